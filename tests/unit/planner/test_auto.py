"""Which shape a group gets where nobody says it: tables worked by hand from the cost model's definition."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilora.coordinator.provision.auto import WORTH, Room, auto_shape
from infinilora.coordinator.provision.shape import Layers, Shape, SiteShape, Speeds, Traffic
from infinilora.protocol.errors import InvalidRequest

QKV, OUT = SiteShape(8, 12, 60), SiteShape(6, 8, 14)
GATE_UP, DOWN = SiteShape(8, 40, 400, experts=4, top_k=2), SiteShape(20, 8, 200, experts=4, top_k=2)
MOE: Layers = ((QKV, OUT, GATE_UP, DOWN),) * 4
DENSE: Layers = ((QKV, OUT),) * 4
SPEEDS = Speeds(
    call_s=1.0,
    peer_s=0.1,
    launch_s=1.0,
    link_bytes_per_s=1e6,
    memory_bytes_per_s=50.0,
    cold_bytes_per_s=100.0,
    base_step_s=10.0,
    ttft_floor_s=5.0,
    peers=8,
)
ALONE = Traffic(engines=1, rows=4.0, distinct_bytes=30_000.0, row_bytes=7_500.0)
FOUR = replace(ALONE, engines=4)
MANY = replace(ALONE, engines=8)
ROOM = Room(max_shards=8, shard_bytes=1 << 30, shared=False)


@pytest.mark.parametrize(
    ("why", "layers", "traffic", "speeds", "room", "shape"),
    [
        ("nobody waits for stages", DENSE, ALONE, SPEEDS, ROOM, Shape(1, 1)),
        ("engines that wait for one another", DENSE, MANY, SPEEDS, ROOM, Shape(1, 4)),
        ("four experts are read four times as fast", MOE, ALONE, SPEEDS, ROOM, Shape(4, 1)),
        ("further peers cost more than they save", MOE, ALONE, replace(SPEEDS, peer_s=1e4), ROOM, Shape(1, 1)),
        ("as many peers as a stage may have", MOE, ALONE, replace(SPEEDS, peers=2), ROOM, Shape(2, 1)),
        ("room for two", MOE, ALONE, SPEEDS, replace(ROOM, max_shards=2), Shape(2, 1)),
        ("room for three, and four experts", MOE, ALONE, SPEEDS, replace(ROOM, max_shards=3), Shape(2, 1)),
        (
            "stages and columns, and no more than there is room for",
            MOE,
            FOUR,
            SPEEDS,
            replace(ROOM, max_shards=4),
            Shape(2, 2),
        ),
        ("room for one", MOE, MANY, SPEEDS, replace(ROOM, max_shards=1), Shape(1, 1)),
        ("one memory, however many read it", MOE, ALONE, SPEEDS, replace(ROOM, shared=True), Shape(1, 1)),
        ("bytes for half of a pool on a shard", DENSE, ALONE, SPEEDS, replace(ROOM, shard_bytes=500), Shape(1, 2)),
    ],
)
def test_the_fastest_shape_that_there_is_room_for(
    why: str, layers: Layers, traffic: Traffic, speeds: Speeds, room: Room, shape: Shape
) -> None:
    assert auto_shape(layers, 1000, traffic, speeds, room).shape == shape, why


def test_what_a_choice_promises_is_worked_by_hand() -> None:
    """A layer reads all of its 2,000 bytes in one place, or a half of it in each of two; calls go to one or two."""
    layers: Layers = ((GATE_UP,),)
    traffic = Traffic(engines=1, rows=100.0, distinct_bytes=2000.0, row_bytes=2000.0)
    speeds = replace(SPEEDS, link_bytes_per_s=1e12)
    found = auto_shape(layers, 1, traffic, speeds, replace(ROOM, max_shards=2))
    assert (found.smallest, found.shape) == (Shape(1, 1), Shape(2, 1))
    assert found.smallest_step_s == pytest.approx(10 + 2 * 1.0 + 1 + 2000 / 50)
    assert found.step_s == pytest.approx(10 + 2 * 1.1 + 1 + 1000 / 50)


def test_no_room_is_said() -> None:
    with pytest.raises(InvalidRequest, match=r"at most 2 shards of 10 bytes holds 1000 bytes") as refused:
        auto_shape(DENSE, 1000, ALONE, SPEEDS, Room(max_shards=2, shard_bytes=10, shared=False))
    assert refused.value.param == "lora_shape"


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([DENSE, MOE]),
    st.integers(1, 8),
    st.floats(1.0, 1e5),
    st.floats(1e-3, 1e2),
    st.integers(1, 8),
    st.booleans(),
)
def test_a_larger_shape_is_worth_it_and_fits(
    layers: Layers, engines: int, read: float, peer_s: float, max_shards: int, shared: bool
) -> None:
    traffic = Traffic(engines, 4.0, read, read / 4)
    room = Room(max_shards, 1 << 30, shared=shared)
    found = auto_shape(layers, 1000, traffic, replace(SPEEDS, peer_s=peer_s), room)
    assert found.shape.shards <= max_shards
    assert found.shape == found.smallest or found.step_s < found.smallest_step_s * (1 - WORTH)
