"""What is taken for the beginning of a rise: by table, against theory, and by property."""

import math
import random
from statistics import NormalDist, fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.coordinator.rise import AHEAD, ALARM, KNOWN, LINES, UPPER, Rise, Spreads

HORIZON, LEVEL = 6, 60.0


def fed(counts: list[float]) -> Rise:
    rise = Rise(HORIZON)
    for count in counts:
        rise.step(count)
    return rise


def counts_of(means: list[float], dice: random.Random, dispersion: float = 1.0) -> list[float]:
    """Gamma-distributed, with the mean and the variance of counts."""
    return [dice.gammavariate(mean / dispersion, dispersion) for mean in means]


def line(slope: float, size: int) -> list[float]:
    return [LEVEL + slope * k for k in range(1, size + 1)]


def squares(size: int) -> int:
    return sum(k * k for k in range(1, size + 1))


@pytest.mark.parametrize(
    "counts", [[], [0.0] * 50, [LEVEL] * 200, [LEVEL] * (KNOWN + LINES[0] - 2) + [10 * LEVEL], [*line(-1, 40)]]
)
def test_what_is_flat_falls_or_is_not_known_does_not_rise(counts: list[float]) -> None:
    assert fed(counts).ahead() is None


@pytest.mark.parametrize("size", LINES)
def test_a_line_is_carried_on_for_a_horizon(size: int) -> None:
    ahead = fed([*[LEVEL] * 60, *line(30.0, size)]).ahead()
    off = AHEAD * math.sqrt(LEVEL / squares(size))
    assert ahead == pytest.approx(LEVEL + (30.0 + off) * (size + HORIZON))


def test_of_lines_that_are_nearly_as_likely_the_steepest_counts() -> None:
    """Ten buckets of a slight rise: it may have begun eight ago."""
    ahead = fed([*[LEVEL] * 60, *line(2.0, 10)]).ahead()
    assert ahead is not None
    assert ahead > LEVEL + (2.0 + AHEAD * math.sqrt(LEVEL / squares(10))) * (10 + HORIZON) + 5


@pytest.mark.parametrize("size", [1, 2, 5, 12, 30])
def test_another_level_is_not_carried_on(size: int) -> None:
    """Three times the load: its new level, and what it may be off by."""
    ahead = fed([*[LEVEL] * 60, *[3 * LEVEL] * size]).ahead()
    assert ahead == pytest.approx(3 * LEVEL + UPPER * math.sqrt(3 * LEVEL / size), rel=0.05)


def test_a_rise_is_found_as_late_as_theory_says() -> None:
    """Of slope s from level m the z is s sqrt(1 + 4 + ... + n^2) / sqrt(m) after n buckets: half are found before that
    is ALARM, as several lines are tried. It takes nearly three times the slope for half the time."""
    for slope in (1.0, 2.0, 4.0):
        delays = [delay(slope, random.Random(seed)) for seed in range(60)]
        expected = (3 * LEVEL * (ALARM / slope) ** 2) ** (1 / 3)
        assert expected - 3 <= median(delays) <= math.ceil(expected)


def delay(slope: float, dice: random.Random) -> int:
    """After how many buckets a rise is found."""
    rise = fed(counts_of([LEVEL] * 150, dice))
    for size, count in enumerate(counts_of(line(slope, 60), dice), 1):
        rise.step(count)
        if rise.ahead() is not None:
            return size
    return 60


@pytest.mark.parametrize("dispersion", [1.0, 4.0])
def test_false_alarms_of_a_flat_load_are_as_rare_as_theory_says(dispersion: float) -> None:
    """All lines together alarm in at most eight times the buckets in which one does: they overlap."""
    rise, alarms = Rise(HORIZON), []
    for count in counts_of([LEVEL] * 20_000, random.Random(1), dispersion):
        rise.step(count)
        alarms.append(rise.ahead() is not None)
    assert fmean(alarms[200:]) < 8 * (1 - NormalDist().cdf(ALARM))


@pytest.mark.parametrize("dispersion", [1.0, 4.0])
def test_what_noise_may_make_foreseen_it_hardly_ever_does(dispersion: float) -> None:
    """Two days of buckets of ten seconds: a handful above it."""
    rise, above = Rise(HORIZON), 0
    for count in counts_of([LEVEL] * 17_280, random.Random(2), dispersion):
        rise.step(count)
        ahead = rise.ahead()
        above += ahead is not None and ahead > rise.by_noise()
    assert above <= 10


def test_what_noise_may_make_foreseen_is_the_steepest_line_of_so_many_spreads() -> None:
    steepest = (4.0 + AHEAD) * math.sqrt(LEVEL / squares(LINES[0]))
    assert fed([LEVEL] * 60).by_noise() == pytest.approx(LEVEL + steepest * (LINES[0] + HORIZON))
    assert fed([LEVEL] * (KNOWN + LINES[0] - 1)).by_noise() == 0


def test_nobody_comes_by_noise_where_nobody_comes() -> None:
    assert fed([*[LEVEL] * 200, *[0.0] * KNOWN]).by_noise() == 0


@pytest.mark.parametrize("dispersion", [1.0, 4.0, 9.0])
def test_by_how_much_counts_spread_is_learnt(dispersion: float) -> None:
    spreads, seen = Spreads(), []
    for count in counts_of([LEVEL] * 3000, random.Random(3), dispersion):
        spreads.step(count)
        seen.append(spreads.dispersion)
    assert median(seen[200:]) == pytest.approx(dispersion, rel=0.15)


def test_a_rise_is_not_taken_for_a_spread() -> None:
    spreads = Spreads()
    for count in [*counts_of([LEVEL] * 200, random.Random(4)), *line(4.0, 3 * LINES[-1])]:
        spreads.step(count)
    assert spreads.dispersion < 1.3


def test_a_sudden_load_hardly_changes_how_counts_spread_and_not_at_once() -> None:
    spreads = Spreads()
    for count in counts_of([LEVEL] * 200, random.Random(5)):
        spreads.step(count)
    before = spreads.dispersion
    seen = []
    for count in [10 * LEVEL, *counts_of([LEVEL] * 40, random.Random(6))]:
        spreads.step(count)
        seen.append(spreads.dispersion)
    assert seen[0] == pytest.approx(before, abs=0.05)
    assert seen[0] < max(seen) < before + 0.3


@given(st.lists(st.floats(0, 1e6), max_size=200))
def test_a_rise_is_above_what_was(counts: list[float]) -> None:
    rise = fed(counts)
    ahead = rise.ahead()
    assert ahead is None or min(counts) < ahead < math.inf
    assert 0 <= rise.by_noise() < math.inf
