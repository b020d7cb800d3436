"""Sketches of times against the times themselves."""

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.protocol.traffic import ACCURACY, LEAST_S, Sketch, Tally, Traffic, merged

BASE = Fingerprint(digest_of(b"base"))
A = digest_of(b"a")
TIMES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200)


def sketch(times: list[float]) -> Sketch:
    made = Sketch()
    for seconds in times:
        made.add(seconds)
    return made


@given(TIMES, st.floats(0, 1))
def test_a_quantile_is_that_of_the_times_to_the_accuracy(times: list[float], share: float) -> None:
    exact = sorted(times)[math.floor(share * (len(times) - 1))]
    found = sketch(times).quantile(share)
    assert found == pytest.approx(exact, rel=1.01 * ACCURACY)


@given(TIMES, st.floats(2e-3, 5e2))
def test_a_share_errs_only_by_times_that_are_at_the_limit(times: list[float], limit: float) -> None:
    found = sketch(times).within(limit)
    least = sum(seconds <= limit * (1 - 2.1 * ACCURACY) for seconds in times)
    most = sum(seconds <= limit * (1 + 2.1 * ACCURACY) for seconds in times)
    assert least <= found <= most


@given(TIMES, TIMES)
def test_merged_sketches_are_the_sketch_of_all_times(ones: list[float], others: list[float]) -> None:
    both = sketch(ones)
    both.merge(sketch(others))
    assert both == sketch(ones + others)


def test_of_no_times_there_is_no_quantile() -> None:
    assert Sketch().quantile(0.5) is None
    assert Sketch().within(1.0) == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, LEAST_S / 10, math.inf])
def test_times_out_of_range_are_counted_at_its_ends(seconds: float) -> None:
    assert sketch([seconds]).count == 1


def test_a_sketch_stays_small() -> None:
    dice = random.Random(1)
    assert len(sketch([10 ** dice.uniform(-6, 6) for _ in range(20_000)]).buckets) <= 925


def test_tallies_of_the_same_are_added_and_stay_as_they_are() -> None:
    one, other, apart = (Tally(BASE, "standard"), Tally(BASE, "standard"), Tally(BASE, "standard", A))
    for tally, seconds in ((one, 0.1), (other, 0.2), (apart, 0.3)):
        tally.ttft.add(seconds)
    found = merged([one, other, apart])
    assert found[BASE, "standard", None].ttft == sketch([0.1, 0.2])
    assert found[BASE, "standard", A].ttft == sketch([0.3])
    assert one.ttft.count == 1


def test_a_report_goes_over_the_bus_as_it_is() -> None:
    tally = Tally(BASE, "interactive", A, ttft=sketch([0.1, 0.2]))
    report = Traffic(gateway="g", incarnation="i", arrivals={BASE: 3}, by_adapter={A: 2}, tallies=(tally,))
    assert msgspec.json.decode(msgspec.json.encode(report), type=Traffic) == report
