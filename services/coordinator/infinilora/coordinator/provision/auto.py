"""Which shape a group has where nobody says it: the fastest that there is room for, by the cost model of shape.py."""

from dataclasses import dataclass, replace

from infinilora.coordinator.provision.shape import Layers, Shape, Speeds, Traffic, pace, splits
from infinilora.protocol.errors import InvalidRequest

WORTH = 0.05
"""A shape with more shards must make an engine's step shorter by this share of it: shards cost, and speeds err."""


@dataclass(frozen=True, slots=True)
class Room:
    """What shards are made of. `shard_bytes`: of adapters on each; `shared`: all are on one machine.

    Then each has its share of the memory's and the links' bandwidth, as it has its share of the cores.
    """

    max_shards: int
    shard_bytes: int
    shared: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """A shape, the step of an engine with it, and that of the smallest one that has room."""

    shape: Shape
    step_s: float
    smallest: Shape
    smallest_step_s: float


def auto_shape(layers: Layers, pool_bytes: int, traffic: Traffic, speeds: Speeds, room: Room) -> Choice:
    """Of the shapes whose shards hold their part of the pool the fastest, but a larger one only for what it is worth.

    InvalidRequest where none has room.
    """
    steps: dict[Shape, float] = {}
    for split in splits(layers, min(speeds.peers, room.max_shards)):
        for stages in range(1, min(len(layers), room.max_shards // split.across) + 1):
            if pool_bytes * split.fullest_share(stages) <= room.shard_bytes:
                shape = Shape(split.across, stages)
                own = _shared(speeds, shape.shards) if room.shared else speeds
                steps[shape] = pace(split, traffic, own).step_s(stages)
    if not steps:
        raise InvalidRequest(
            f"no shape of at most {room.max_shards} shards of {room.shard_bytes} bytes holds {pool_bytes} bytes of "
            "adapters; wanted more shards, or more bytes on each",
            param="lora_shape",
        )
    ranked = sorted(steps, key=lambda shape: (shape.shards, steps[shape], shape))
    best = ranked[0]
    for shape in ranked[1:]:
        if steps[shape] < steps[best] * (1 - WORTH):
            best = shape
    return Choice(best, steps[best], ranked[0], steps[ranked[0]])


def _shared(speeds: Speeds, shards: int) -> Speeds:
    return replace(
        speeds,
        link_bytes_per_s=speeds.link_bytes_per_s / shards,
        memory_bytes_per_s=speeds.memory_bytes_per_s / shards,
    )
