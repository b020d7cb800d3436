"""The cost model: parts of an adapter counted one by one, times worked by hand, the queue by iteration."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilora.coordinator.provision.pools import Demand
from infinilora.coordinator.provision.shape import (
    Layers,
    Shape,
    SiteShape,
    Speeds,
    Traffic,
    numbers_of,
    pace,
    splits,
    traffic_of,
    ttft_s,
)

QKV, OUT = SiteShape(8, 12, 60), SiteShape(6, 8, 14)
GATE_UP, DOWN = SiteShape(8, 40, 400, experts=4, top_k=2), SiteShape(20, 8, 200, experts=4, top_k=2)
MOE: Layers = ((QKV, OUT, GATE_UP, DOWN),) * 3
DENSE: Layers = ((QKV, OUT),) * 4
SPEEDS = Speeds(
    call_s=10.0,
    peer_s=1.0,
    launch_s=2.0,
    link_bytes_per_s=8.0,
    memory_bytes_per_s=50.0,
    cold_bytes_per_s=100.0,
    base_step_s=1000.0,
    ttft_floor_s=5.0,
    peers=8,
)


def step_s(layers: Layers, shape: Shape, traffic: Traffic) -> float:
    (split,) = (one for one in splits(layers, 8) if one.across == shape.experts)
    return pace(split, traffic, SPEEDS).step_s(shape.layers)


def test_experts_are_split_evenly() -> None:
    assert [split.across for split in splits(MOE, 8)] == [1, 2, 4]
    assert [split.across for split in splits(MOE, 3)] == [1, 2]
    assert [split.across for split in splits(DENSE, 8)] == [1]


@pytest.mark.parametrize(
    ("layers", "shape", "fullest"),
    [
        (MOE, Shape(1, 1), 3 * 674),
        (MOE, Shape(1, 3), 674),
        (MOE, Shape(1, 2), 2 * 674),  # three layers in two stages
        (MOE, Shape(2, 1), 3 * (300 + 60)),  # half of the experts, and qkv; o lies on the other
        (MOE, Shape(4, 3), 150 + 60),
        (DENSE, Shape(1, 4), 74),
        (DENSE + DENSE[:1], Shape(1, 3), 2 * 74),  # five layers: two, two and one, never one, one and three
    ],
)
def test_the_fullest_shard_holds_what_is_counted(layers: Layers, shape: Shape, fullest: int) -> None:
    assert (numbers_of(MOE), numbers_of(DENSE)) == (3 * 674, 4 * 74)
    (split,) = (one for one in splits(layers, 8) if one.across == shape.experts)
    assert split.fullest_share(shape.layers) == pytest.approx(fullest / numbers_of(layers))


def test_traffic_is_one_engines_step() -> None:
    group = Demand(np.array([4.0, 2.0]), np.array([100, 300]), 2.0)
    traffic = traffic_of(group, 4)
    assert (traffic.engines, traffic.rows) == (4, 3.0)
    assert traffic.distinct_bytes == pytest.approx((1 - np.exp(-2)) * 100 + (1 - np.exp(-1)) * 300)
    assert traffic.row_bytes == pytest.approx((2 * 100 + 1 * 300) / 3)


def test_a_step_alone_is_the_sum_of_its_calls() -> None:
    """One dense layer: 2 ways of 10 s, launch 2 s, weights 74 x 25 / 50 bytes, rows 3 x (20 + 14) x 2 / 8 bytes."""
    traffic = Traffic(engines=1, rows=3.0, distinct_bytes=74 * 25.0, row_bytes=1.0)
    want = 1000 + 2 * (20 + 2) + 74 * 25 / 50 + 3 * 34 * 2 / 8
    assert step_s(((QKV, OUT),), Shape(1, 1), traffic) == pytest.approx(want)


def test_experts_split_the_work_and_add_peers() -> None:
    """Each row reads 2 of 4 experts of its adapter; two shards share it, and a call goes to both."""
    traffic = Traffic(engines=1, rows=1.0, distinct_bytes=674.0, row_bytes=674.0)
    want = 1000 + 2 * (10 + 1) + 2 + 400 * 2 / 4 / 2 / 50 + 48 * 2 / 2 / 8
    assert step_s(((GATE_UP,),), Shape(2, 1), replace(traffic, row_bytes=400, distinct_bytes=400)) == (
        pytest.approx(want)
    )
    few = replace(traffic, rows=100.0, row_bytes=400, distinct_bytes=400)
    assert step_s(((GATE_UP,),), Shape(1, 1), few) == pytest.approx(
        1000 + 20 + 2 + 400 / 50 + 100 * 48 * 2 / 8  # a hundred rows read no expert twice
    )


@settings(deadline=None)
@given(st.integers(1, 40), st.floats(0.1, 300.0), st.builds(Shape, st.sampled_from([1, 2, 4]), st.integers(1, 3)))
def test_the_queue_is_the_fixed_point_of_its_definition(engines: int, rows: float, shape: Shape) -> None:
    """A stage is busy with the others for rho of a step, and a call waits rho / 2(1 - rho) services."""
    traffic = Traffic(engines, rows, 5000.0, 700.0)
    alone = step_s(MOE, shape, replace(traffic, engines=1))
    per_layer = (alone - SPEEDS.base_step_s - _trips(shape)) / len(MOE)
    stage = -(-len(MOE) // shape.layers) * per_layer
    step = step_s(MOE, shape, traffic)
    rho = (engines - 1) * stage / step
    assert 0 <= rho < 1
    assert step == pytest.approx(alone + len(MOE) * per_layer * rho / (2 * (1 - rho)), rel=1e-6)


def _trips(shape: Shape) -> float:
    return len(MOE) * (2 * 2 * 10.0 + 2 * 2 * (10.0 + shape.experts - 1))


def test_a_first_token_waits_for_the_fullest_shard() -> None:
    assert ttft_s(3000, 1 / 3, 1040.0, SPEEDS) == pytest.approx(5 + 3000 / 3 / 100 + 40)
