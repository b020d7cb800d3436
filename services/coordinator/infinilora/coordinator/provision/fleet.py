"""From a demand and an SLO to groups, their shape and the slots in them: the fewest GPUs that keep all of it."""

import math
from dataclasses import dataclass

from infinilora.coordinator.provision.pools import Demand, Pools, in_slots, pools
from infinilora.coordinator.provision.shape import Layers, Shape, Speeds, pace, splits, traffic_of, ttft_s
from infinilora.protocol.errors import InvalidRequest

NUM_GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of groups that are tried, fewest first: one large pool wastes least."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What must hold: IAR, seconds to a first token and for a token, and the margin over the slots that IAR takes."""

    iar: float
    ttft_s: float
    tpot_s: float
    margin: float


@dataclass(frozen=True, slots=True)
class House:
    """What there is to build with: bytes for adapters on one GPU, engines of the base, groups beyond those needed."""

    gpu_bytes: int
    engines: int
    spare_groups: int
    speeds: Speeds


@dataclass(frozen=True, slots=True, eq=False)
class Provision:
    """The answer. `min_slots` is one pool's, before the margin; `slots` those of the `needed` groups together.

    `iar` holds with those groups alone: the spare ones are for the day on which one of them is gone.
    """

    min_slots: int
    slots: int
    pool_bytes: int
    iar: float
    needed: int
    groups: int
    shape: Shape
    ttft_s: float
    tpot_s: float

    @property
    def gpus(self) -> int:
        return self.groups * self.shape.shards


@dataclass(frozen=True, slots=True, order=True)
class _Fit:
    """A shape that was measured; the least is the best."""

    shards: int
    tpot_s: float
    ttft_s: float
    shape: Shape


def provision(demand: Demand, layers: Layers, goal: Goal, house: House) -> Provision:
    """The fewest groups that can keep the goal, in the smallest and then the fastest shape.

    InvalidRequest, with `param` one of gpu_bytes, ttft_s and tpot_s, when none can.
    """
    one = pools(demand, 1)
    seen: list[_Fit] = []
    for num_groups in NUM_GROUPS:
        found = one if num_groups == 1 else pools(demand, num_groups)
        units = found.with_margin(found.least(goal.iar), goal.margin)
        fits = _fits(found, units * found.unit_bytes, layers, house, int(demand.num_bytes.max()))
        good = [fit for fit in fits if fit.ttft_s <= goal.ttft_s and fit.tpot_s <= goal.tpot_s]
        if good:
            return _answer(one, found, units, min(good), goal, house)
        seen += fits
    raise _refusal(seen, goal, house, int(demand.num_bytes.max()))


def _fits(found: Pools, pool_bytes: int, layers: Layers, house: House, largest: int) -> list[_Fit]:
    """Every shape whose shards hold their part of the pool, and the times of the group that is slowest in it."""
    traffics = [traffic_of(group, house.engines) for group in found.groups]
    fits = []
    for split in splits(layers, house.speeds.peers):
        paces = [pace(split, traffic, house.speeds) for traffic in traffics]
        for stages in range(1, len(layers) + 1):
            share = split.fullest_share(stages)
            if pool_bytes * share <= house.gpu_bytes:
                step = max(one.step_s(stages) for one in paces)
                shape = Shape(split.across, stages)
                fits.append(_Fit(shape.shards, step, ttft_s(largest, share, step, house.speeds), shape))
    return fits


def _answer(one: Pools, found: Pools, units: int, fit: _Fit, goal: Goal, house: House) -> Provision:
    counted, needed = in_slots(found), len(found.groups)
    return Provision(
        min_slots=in_slots(one).least(goal.iar),
        slots=needed * counted.with_margin(counted.least(goal.iar), goal.margin),
        pool_bytes=units * found.unit_bytes,
        iar=1.0 - found.refused(units),
        needed=needed,
        groups=needed + house.spare_groups,
        shape=fit.shape,
        ttft_s=fit.ttft_s,
        tpot_s=fit.tpot_s,
    )


def _refusal(seen: list[_Fit], goal: Goal, house: House, largest: int) -> InvalidRequest:
    """Which limit cannot be kept, and how near the best of all that was tried comes."""
    if not seen:
        return InvalidRequest(
            f"found {house.gpu_bytes} bytes on a GPU; wanted more: no shape of {NUM_GROUPS[-1]} groups holds its pool "
            f"(the largest adapter has {largest} bytes)",
            param="gpu_bytes",
        )
    ttft, tpot = min(fit.ttft_s for fit in seen), min(fit.tpot_s for fit in seen)
    if ttft > goal.ttft_s:
        return InvalidRequest(
            f"found {goal.ttft_s:g} s; wanted {_up(ttft)} s or more: the best shape's", param="ttft_s"
        )
    return InvalidRequest(f"found {goal.tpot_s:g} s; wanted {_up(tpot)} s or more: the best shape's", param="tpot_s")


def _up(seconds: float) -> float:
    """Rounded up to a millisecond: what is told to be enough is enough."""
    return math.ceil(seconds * 1000) / 1000
