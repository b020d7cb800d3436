"""What is foreseen, against made traffic whose law is known."""

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.coordinator.forecast import DAMPED, METHODS, Ewma, Forecaster, Holt, HoltWinters, band
from infinilora.coordinator.rise import UPPER

HORIZON, SEASON = 6, 96


def fed(counts: list[float], methods: tuple[str, ...] = tuple(METHODS)) -> Forecaster:
    forecaster = Forecaster(horizon=HORIZON, season=SEASON, methods=methods)
    for count in counts:
        forecaster.step(count)
    return forecaster


def noisy(seed: int, size: int, mean: float = 100.0) -> list[float]:
    dice = random.Random(seed)
    return [max(0.0, dice.gauss(mean, math.sqrt(mean))) for _ in range(size)]


def wave(index: int) -> float:
    return 100 + 80 * math.sin(2 * math.pi * index / SEASON)


def test_nothing_is_foreseen_of_nothing() -> None:
    said = fed([]).ahead()
    assert (said.count, said.upper, said.error) == (0.0, 0.0, None)


def test_before_anything_is_known_what_came_last_comes_again() -> None:
    said = fed([3.0, 7.0]).ahead()
    assert (said.method, said.count, said.upper, said.error) == ("last", 7.0, 7.0, None)


def test_before_any_method_was_tested_all_stays_as_it_is_within_what_counts_spread_by() -> None:
    said = fed([100.0] * 30).ahead()
    assert (said.method, said.count, said.upper) == ("level", 100.0, 100.0 + UPPER * 10)
    assert said.error == pytest.approx(10 * math.sqrt(2 / math.pi), rel=0.01)


def test_a_load_that_rises_is_reckoned_with_before_it_has_risen() -> None:
    flat, rising = noisy(7, 200), [100.0 + 6 * k for k in range(1, 9)]
    said = fed([*flat, *rising]).ahead()
    assert said.rises
    assert said.upper > rising[-1] + 6 * HORIZON / 2
    assert not fed(flat).ahead().rises


def test_the_sum_that_a_damped_trend_goes_on_by() -> None:
    holt = Holt(1.0, 1.0)
    for count in (10.0, 10.0, 12.0):
        holt.step(count)
    # A level of 12 with a trend of 2 that each bucket leaves DAMPED of.
    assert holt.ahead(3) == pytest.approx(12 + 2 * (DAMPED + DAMPED**2 + DAMPED**3))


def test_an_average_forgets_by_the_same_share_with_each_bucket() -> None:
    ewma = Ewma(0.25)
    for count in (8.0, 4.0, 0.0):
        ewma.step(count)
    assert ewma.ahead(1) == pytest.approx((8 * 0.75 + 4 * 0.25) * 0.75)


def test_a_season_is_not_known_before_it_is_over_and_comes_again_after() -> None:
    method = HoltWinters(0.1, 0.2, 4)
    said = []
    for count in (1.0, 2.0, 9.0, 4.0):
        said.append(method.ahead(1))
        method.step(count)
    assert said == [None] * 4
    assert method.ahead(2) > method.ahead(1)  # type: ignore[operator]


def test_flat_noise_is_foreseen_by_an_average_and_not_by_its_last_value() -> None:
    said = fed(noisy(1, 600)).ahead()
    assert said.method != "last"
    assert said.count == pytest.approx(100, abs=5)


def test_a_jump_that_stays_is_followed_within_a_lead_time() -> None:
    assert fed([*noisy(2, 300), *noisy(3, 12, mean=300.0)]).ahead().upper > 290


def test_day_and_night_are_foreseen_at_their_steepest() -> None:
    """After four days, where a lead time brings the greatest change, the season says more than what came last."""
    dice, index = random.Random(4), 4 * SEASON + SEASON // 2 - HORIZON // 2
    counts = [dice.gauss(wave(i), math.sqrt(max(wave(i), 1))) for i in range(index)]
    said = fed(counts).ahead()
    assert said.method == "holt-winters"
    assert abs(said.count - wave(index + HORIZON - 1)) < abs(counts[-1] - wave(index + HORIZON - 1))


def test_the_band_covers_nine_of_ten_and_is_no_wider_than_it_must_be() -> None:
    counts, forecaster, covered, widths = noisy(5, 1500), fed([]), [], []
    said: list[float] = []
    for index, count in enumerate(counts):
        if index >= 500:
            covered.append(count <= said[index - HORIZON])
            widths.append(said[index - HORIZON] - 100)
        forecaster.step(count)
        said.append(forecaster.ahead().upper)
    assert 0.86 <= fmean(covered) <= 0.96
    assert fmean(widths) < 2.5 * math.sqrt(100)


@pytest.mark.parametrize(("errors", "wanted"), [([1.0], 1.0), ([3.0, -1.0], 3.0), ([float(i) for i in range(10)], 8.0)])
def test_the_band_is_what_nine_of_ten_errors_are_not_above(errors: list[float], wanted: float) -> None:
    assert band(errors) == wanted


@given(st.lists(st.floats(0, 1e6), max_size=150))
def test_no_traffic_makes_a_forecast_that_is_no_count(counts: list[float]) -> None:
    said = fed(counts).ahead()
    assert 0 <= said.count <= said.upper < math.inf


@given(st.lists(st.floats(0, 1e4), min_size=30, max_size=80), st.sampled_from([0.25, 2.0, 1024.0]))
def test_twice_the_traffic_is_twice_the_forecast(counts: list[float], factor: float) -> None:
    """No method knows a unit."""
    one, other = fed(counts).ahead(), fed([count * factor for count in counts]).ahead()
    assert other.count == pytest.approx(one.count * factor)


def test_after_a_busy_hour_nobody_reckons_with_its_errors_in_a_quiet_one() -> None:
    said = fed([*noisy(6, 200, mean=400.0), *[0.0] * 120]).ahead()
    assert said.upper < 10
