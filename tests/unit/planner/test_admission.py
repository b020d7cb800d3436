"""The admission curve against the definition, summed over every set of adapters that can be in use."""

from collections.abc import Sequence
from itertools import pairwise, product
from math import exp, expm1, fsum, prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from infinilora.coordinator.provision.admission import Curve, curve, reach
from infinilora.coordinator.provision.popularity import zipf

LOADS = st.lists(st.floats(1e-9, 6.0), min_size=1, max_size=6)


def found(offered: Sequence[float], sizes: Sequence[int], width: int | None = None) -> Curve:
    return curve(np.array(offered, dtype=np.float64), np.array(sizes, dtype=np.int64), width)


def slots(num_adapters: int, exponent: float, in_flight: float) -> Curve:
    return curve(zipf(num_adapters, exponent) * in_flight, np.ones(num_adapters, dtype=np.int64))


def refused_by_definition(offered: Sequence[float], sizes: Sequence[int], capacity: int) -> float:
    """Every subset of the adapters with its probability; every request's adapter; a yes or no for each."""
    total = fsum(offered)
    mean_use = fsum(-expm1(-m) * size for m, size in zip(offered, sizes, strict=True))
    is_small = capacity < mean_use
    terms = []
    for state in product((False, True), repeat=len(offered)):
        chance = prod(-expm1(-m) if on else exp(-m) for m, on in zip(offered, state, strict=True))
        for j, m in enumerate(offered):
            others = sum(size for i, size in enumerate(sizes) if state[i] and i != j)
            if others + sizes[j] > capacity and (is_small or not state[j]):
                terms.append(chance * m / total)
    return fsum(terms)


@settings(deadline=None)
@given(offered=LOADS, data=st.data())
def test_the_curve_is_the_definition(offered: list[float], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(offered), max_size=len(offered)))
    mean_use = fsum(-expm1(-m) * size for m, size in zip(offered, sizes, strict=True))
    assume(min(mean_use % 1, 1 - mean_use % 1) > 1e-9)  # on the very edge of a unit, rounding decides which side
    one = found(offered, sizes)
    for capacity in range(sum(sizes) + 2):
        assert one.refused_with(capacity) == pytest.approx(
            refused_by_definition(offered, sizes, capacity), rel=1e-9, abs=0
        )


def test_a_small_tail_keeps_its_digits() -> None:
    offered, sizes = [1e-9] * 7, [1] * 7
    want = refused_by_definition(offered, sizes, 6)
    assert 0 < want < 1e-50
    assert found(offered, sizes).refused_with(6) == pytest.approx(want, rel=1e-9, abs=0)


@pytest.mark.parametrize(("in_flight", "want"), [(32, 24), (128, 58), (256, 90), (1024, 198)])
def test_the_worked_values_come_out(in_flight: int, want: int) -> None:
    """512 adapters, Zipf 1.2, 95 % admitted at once."""
    one = slots(512, 1.2, in_flight)
    assert one.least(0.95) == want
    assert one.refused_with(want) <= 0.05 < one.refused_with(want - 1)


@settings(deadline=None)
@given(offered=LOADS, data=st.data())
def test_more_slots_refuse_less(offered: list[float], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(offered), max_size=len(offered)))
    one = found(offered, sizes)
    told = [one.refused_with(capacity) for capacity in range(-1, sum(sizes) + 3)]
    assert all(before >= after for before, after in pairwise(told))
    assert told[0] == pytest.approx(1.0)
    assert told[-1] == 0.0


@settings(deadline=None)
@given(offered=LOADS, data=st.data())
def test_the_least_that_is_enough_is_found(offered: list[float], data: st.DataObject) -> None:
    one = found(offered, [1] * len(offered))
    capacity = data.draw(st.integers(0, len(offered)))
    refused = one.refused_with(capacity)
    assert one.least(1 - refused - 1e-9) <= capacity
    if refused > 1e-6:
        assert one.least(1 - refused + 1e-9) > capacity


@settings(deadline=None)
@given(st.integers(4, 40), st.floats(0.0, 2.0), st.floats(0.1, 500.0), st.floats(1.05, 4.0))
def test_more_requests_in_flight_are_refused_more(num: int, exponent: float, in_flight: float, times: float) -> None:
    light, heavy = slots(num, exponent, in_flight), slots(num, exponent, in_flight * times)
    for capacity in range(num + 1):
        assert heavy.refused_with(capacity) >= light.refused_with(capacity) - 1e-12
    assert heavy.least(0.95) >= light.least(0.95)


@settings(deadline=None)
@given(offered=LOADS, size=st.integers(1, 50))
def test_equal_sizes_are_slots(offered: list[float], size: int) -> None:
    in_units, in_slots = found(offered, [size] * len(offered)), found(offered, [1] * len(offered))
    for capacity in range(len(offered) + 1):
        for spare in {0, size - 1}:
            got = in_units.refused_with(capacity * size + spare)
            assert got == pytest.approx(in_slots.refused_with(capacity), rel=1e-9, abs=0) or _on_the_edge(
                offered, capacity, size, spare
            )


def _on_the_edge(offered: list[float], capacity: int, size: int, spare: int) -> bool:
    """Units between two slots may hold what is in use on average where the slot below does not."""
    mean_use = fsum(-expm1(-m) for m in offered)
    return capacity < mean_use + 1e-9 and mean_use - 1e-9 <= (capacity * size + spare) / size


@settings(deadline=None)
@given(st.permutations(range(6)))
def test_the_order_of_the_adapters_does_not_matter(order: list[int]) -> None:
    offered, sizes = [0.1, 3.0, 0.7, 0.02, 1.0, 0.4], [3, 1, 4, 1, 5, 9]
    one = found(offered, sizes)
    other = found([offered[i] for i in order], [sizes[i] for i in order])
    assert other.refused == pytest.approx(one.refused, rel=1e-9, abs=0)


@settings(deadline=None)
@given(offered=LOADS, data=st.data())
def test_a_narrow_curve_is_the_first_part_of_the_whole(offered: list[float], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(offered), max_size=len(offered)))
    width = data.draw(st.integers(1, sum(sizes)))
    narrow, whole = found(offered, sizes, width), found(offered, sizes, sum(sizes))
    assert narrow.refused[:width] == pytest.approx(whole.refused[:width], rel=1e-9, abs=0)
    for capacity in range(sum(sizes) + 1):
        assert narrow.refused_with(capacity) >= whole.refused_with(capacity) * (1 - 1e-9)


def test_what_lies_beyond_the_reach_is_nothing() -> None:
    offered = zipf(2000, 1.2) * 50
    ones = np.ones(2000, dtype=np.int64)
    width = reach(offered, ones)
    assert width < 200
    assert curve(offered, ones).refused_with(width) < 1e-20
    assert curve(offered, ones).least(0.95) == curve(offered, ones, 2000).least(0.95)


def test_adapters_that_are_always_in_use_all_need_a_slot() -> None:
    """The bare formula would say none: every request finds its adapter in use."""
    assert slots(10, 0.0, 1000.0).least(0.95) == 10


def test_an_adapter_nobody_asks_for_changes_nothing() -> None:
    assert found([1.0, 0.5, 0.0], [1, 1, 1]).refused_with(1) == found([1.0, 0.5], [1, 1]).refused_with(1)
