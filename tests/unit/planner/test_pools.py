"""Demands dealt to groups: nothing lost, nothing in the wrong place, and the smallest pool that keeps the target."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilora.coordinator.provision.pools import MAX_UNITS, Demand, deal, in_slots, pools, unit_of
from infinilora.coordinator.provision.popularity import shares, zipf
from infinilora.protocol.errors import InvalidRequest

DEMANDS = st.builds(
    lambda rates, seed, residence: Demand(
        np.array(rates), np.random.default_rng(seed).integers(1, 50, len(rates)) * 1000, residence
    ),
    st.lists(st.floats(0.001, 50.0), min_size=1, max_size=30),
    st.integers(0, 99),
    st.floats(0.1, 10.0),
)


@settings(deadline=None)
@given(DEMANDS, st.integers(1, 8))
def test_every_request_goes_to_one_group_and_no_group_has_an_adapter_twice(demand: Demand, num_groups: int) -> None:
    sized = Demand(demand.rates, np.arange(1, len(demand.rates) + 1), demand.residence_s)  # a size names its adapter
    groups = deal(sized, num_groups)
    got = np.zeros(len(sized.rates))
    for group in groups:
        assert len(set(group.num_bytes.tolist())) == len(group.num_bytes)
        got[group.num_bytes - 1] += group.rates
    assert got == pytest.approx(sized.rates)
    assert len(groups) <= num_groups


def test_an_adapter_hotter_than_a_group_is_in_several() -> None:
    demand = Demand(np.array([6.0, 1.0, 1.0]), np.array([7, 8, 9]), 1.0)
    groups = deal(demand, 4)
    assert [7 in group.num_bytes for group in groups].count(True) == 3  # its share is three even shares
    assert all(rate == 2.0 for group in groups for rate in group.rates[group.num_bytes == 7])


@settings(deadline=None)
@given(DEMANDS, st.integers(1, 4), st.floats(0.5, 0.999))
def test_the_least_pool_keeps_the_target_and_one_unit_less_does_not(demand: Demand, groups: int, target: float) -> None:
    found = pools(demand, groups)
    units = found.least(target)
    assert found.refused(units) <= 1 - target
    assert units == 0 or found.refused(units - 1) > 1 - target


def test_equal_sizes_are_slots_of_that_size() -> None:
    demand = Demand(zipf(512, 1.2) * 32, np.full(512, 3_375_366_144), 4.0)
    found = pools(demand, 1)
    assert (found.unit_bytes, found.least(0.95)) == (3_375_366_144, 58)
    assert in_slots(found) is found


def test_mixed_sizes_have_slots_too() -> None:
    demand = Demand(zipf(512, 1.2) * 128, np.resize([1000, 2000, 4000], 512), 1.0)
    found = pools(demand, 1)
    assert found.unit_bytes == 1000
    assert in_slots(found).least(0.95) == 58
    assert found.least(0.95) > 58


@settings(deadline=None)
@given(st.lists(st.integers(10**6, 10**9), min_size=2, max_size=40, unique=True))
def test_odd_sizes_are_rounded_up_and_never_down(sizes: list[int]) -> None:
    num_bytes, rates = np.array(sizes), np.ones(len(sizes))
    found = pools(Demand(rates, num_bytes, 1.0), 1)
    assert found.whole <= MAX_UNITS + len(sizes)
    assert found.whole * found.unit_bytes >= sum(sizes)
    assert found.whole * found.unit_bytes <= sum(sizes) + len(sizes) * found.unit_bytes


def test_a_unit_is_a_common_divisor_where_there_is_one() -> None:
    assert unit_of(np.array([600, 900, 1500]), 3000) == 300
    assert unit_of(np.array([3, 7 * MAX_UNITS]), 2 * MAX_UNITS) == 2
    assert unit_of(np.array([5, 5, 5]), 5 * 10**9) == 5


@pytest.mark.parametrize(
    ("units", "margin", "want"), [(50, 0.1, 55), (20, 0.1, 22), (21, 0.1, 24), (20, 0.0, 20), (95, 0.1, 100)]
)
def test_a_margin_is_rounded_up_and_never_more_than_everything(units: int, margin: float, want: int) -> None:
    found = pools(Demand(np.ones(100), np.full(100, 8), 1.0), 1)
    assert found.with_margin(units, margin) == want


def test_zipf_is_the_law() -> None:
    assert zipf(4, 0.0).tolist() == [0.25] * 4
    one = zipf(512, 1.2)
    assert one[0] / one[7] == pytest.approx(8**1.2)
    assert one.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ([1.0, -1.0], "number 1: found -1.0; wanted 0 or more"),
        ([float("nan")], "number 0: found nan; wanted 0 or more"),
        ([0.0, 0.0], "found a sum of 0.0; wanted more than 0, and finite"),
    ],
)
def test_weights_that_mean_nothing_are_named(weights: list[float], told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shares(np.array(weights))
    assert caught.value.message == told
