"""Groups and shapes: the fewest GPUs that keep every limit, and a name for the limit that none keeps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from infinilora.coordinator.provision.fleet import Goal, House, provision
from infinilora.coordinator.provision.pools import Demand, deal
from infinilora.coordinator.provision.popularity import zipf
from infinilora.coordinator.provision.shape import Shape, pace, splits, traffic_of, ttft_s
from infinilora.planner.constants import read_constants
from infinilora.planner.geometry import TARGETS, find_base
from infinilora.protocol.errors import InvalidRequest

BASE = find_base("qwen3-30b-a3b", frozenset(TARGETS))
ADAPTER = BASE.adapter_bytes(32, 2)
SPEEDS = read_constants().speeds("host")
GOAL = Goal(iar=0.95, ttft_s=0.25, tpot_s=0.1, margin=0.1)
HOUSE = House(gpu_bytes=90 * 10**9, engines=1, spare_groups=0, speeds=SPEEDS)


def demand(in_flight: float, *, adapters: int = 512, size: int = ADAPTER) -> Demand:
    return Demand(zipf(adapters, 1.2) * in_flight, np.full(adapters, size), 1.0)


@settings(max_examples=30, deadline=None)
@given(st.floats(1.0, 400.0), st.integers(5, 200), st.floats(0.1, 0.3))
def test_no_smaller_shape_of_one_group_keeps_the_goal(in_flight: float, gpu_gb: int, slo: float) -> None:
    asked, gpu_bytes = demand(in_flight, adapters=64), gpu_gb * 10**9
    found = provision(asked, BASE.layers, replace(GOAL, ttft_s=slo), replace(HOUSE, gpu_bytes=gpu_bytes))
    assume(found.needed == 1)
    assert found.iar >= 0.95
    assert found.pool_bytes == found.slots * ADAPTER
    assert found.slots == min(64, -(-found.min_slots * 11 // 10))
    good = {}
    for split in splits(BASE.layers, SPEEDS.peers):
        steps = pace(split, traffic_of(asked, 1), SPEEDS)
        for stages in range(1, 49):
            share, step = split.fullest_share(stages), steps.step_s(stages)
            if found.pool_bytes * share <= gpu_bytes and ttft_s(ADAPTER, share, step, SPEEDS) <= slo and step <= 0.1:
                good[Shape(split.across, stages)] = (split.across * stages, step)
    assert good[found.shape] == min(good.values()) == (found.shape.shards, found.tpot_s)


def test_a_shorter_first_token_takes_more_shards() -> None:
    """3.4 GB come in at 50 GB/s a shard: 68 ms with one."""
    loose = provision(demand(2.0), BASE.layers, GOAL, HOUSE)
    tight = provision(demand(2.0), BASE.layers, replace(GOAL, ttft_s=0.11), HOUSE)
    assert loose.shape.shards == 1
    assert tight.shape.shards > 1
    assert tight.ttft_s <= 0.11 < loose.ttft_s


def test_a_load_that_one_group_cannot_answer_in_time_is_dealt_to_several() -> None:
    heavy = replace(HOUSE, engines=800)
    found = provision(demand(80_000.0), BASE.layers, GOAL, heavy)
    assert found.needed > 1
    assert found.iar >= 0.95
    (split,) = (one for one in splits(BASE.layers, SPEEDS.peers) if one.across == found.shape.experts)
    groups = deal(demand(80_000.0), found.needed)
    steps = [pace(split, traffic_of(group, 800), SPEEDS).step_s(found.shape.layers) for group in groups]
    assert min(steps) < found.tpot_s == max(steps) <= 0.1


def test_spare_groups_are_paid_for_and_not_counted_on() -> None:
    plain, spared = (provision(demand(240.0), BASE.layers, GOAL, replace(HOUSE, spare_groups=n)) for n in (0, 1))
    assert (spared.groups, spared.needed) == (plain.groups + 1, plain.needed)
    assert spared.gpus == 2 * plain.gpus
    assert (spared.slots, spared.iar) == (plain.slots, plain.iar)


@pytest.mark.parametrize(
    ("goal", "house", "param"),
    [
        (replace(GOAL, ttft_s=0.01), HOUSE, "ttft_s"),
        (replace(GOAL, tpot_s=0.01), HOUSE, "tpot_s"),
        (GOAL, replace(HOUSE, gpu_bytes=1_000_000), "gpu_bytes"),
    ],
)
def test_the_limit_that_no_plan_keeps_is_named(goal: Goal, house: House, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        provision(demand(240.0), BASE.layers, goal, house)
    assert caught.value.param == param


@pytest.mark.parametrize("param", ["ttft_s", "tpot_s"])
def test_what_the_refusal_asks_for_is_enough(param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        provision(demand(240.0), BASE.layers, replace(GOAL, **{param: 0.001}), HOUSE)
    enough = float(caught.value.message.split("wanted ")[1].split(" s")[0])
    provision(demand(240.0), BASE.layers, replace(GOAL, **{param: enough}), HOUSE)
