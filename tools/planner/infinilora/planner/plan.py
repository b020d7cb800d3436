"""A plan: for each base its groups, shape and slots, and what all of it costs. Runs the coordinator's own policy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from infinilora.coordinator.provision.admission import reach
from infinilora.coordinator.provision.fleet import Goal, House, Provision, provision
from infinilora.planner.constants import Constants, Tier
from infinilora.planner.workload import MAX_BYTES, MAX_NUMBER, Served, positive
from infinilora.protocol.errors import InvalidRequest

SECONDS_PER_HOUR = 3600
MOST_SUMS = 1e10
"""Adapters x slots that are reckoned through at most: a minute or so."""


@dataclass(frozen=True, slots=True)
class Means:
    """What there is to build with. `engines` 0: as many as the constants say; `gpu_price` 0: theirs."""

    gpu_bytes: float
    engines: int
    spare_groups: int
    gpu_price: float
    cold_from: Tier


class BasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One base's part of a plan. `min_slots` is one pool's, before the margin; times in seconds."""

    model: str
    adapters: int
    in_flight: float
    engines: int
    adapter_bytes: int
    min_slots: int
    slots: int
    pool_bytes: int
    iar: float
    groups: int
    expert_parallel: int
    layer_parallel: int
    shards: int
    ttft_s: float
    tpot_s: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over the bases; `iar` is that of all requests; `shards` are GPUs; the cost is in the price's unit."""

    min_slots: int
    slots: int
    iar: float
    groups: int
    shards: int
    cost_per_hour: float
    cost_per_million_requests: float
    bases: tuple[BasePlan, ...]


def make_plan(served: Sequence[Served], goal: Goal, means: Means, constants: Constants) -> Plan:
    """InvalidRequest has `param`: the number that is wrong, or the limit that no plan keeps."""
    _check(goal, means)
    for one in served:
        _check_size(one)
    bases = tuple(_plan_base(one, goal, means, constants) for one in served)
    rates = [float(one.demand.rates.sum()) for one in served]
    shards = sum(base.shards for base in bases)
    per_hour = shards * (means.gpu_price or constants.gpu_hour_price.value)
    return Plan(
        min_slots=sum(base.min_slots for base in bases),
        slots=sum(base.slots for base in bases),
        iar=sum(base.iar * rate for base, rate in zip(bases, rates, strict=True)) / sum(rates),
        groups=sum(base.groups for base in bases),
        shards=shards,
        cost_per_hour=per_hour,
        cost_per_million_requests=per_hour / (sum(rates) * SECONDS_PER_HOUR) * 1e6,
        bases=bases,
    )


def _plan_base(served: Served, goal: Goal, means: Means, constants: Constants) -> BasePlan:
    demand = served.demand
    engines = means.engines or max(1, math.ceil(demand.in_flight / constants.rows_per_engine.value))
    house = House(int(means.gpu_bytes), engines, means.spare_groups, constants.speeds(means.cold_from))
    found: Provision = provision(demand, served.base.layers, goal, house)
    return BasePlan(
        model=served.base.name,
        adapters=len(demand.rates),
        in_flight=demand.in_flight,
        engines=engines,
        adapter_bytes=int(demand.num_bytes.max()),
        min_slots=found.min_slots,
        slots=found.slots,
        pool_bytes=found.pool_bytes,
        iar=found.iar,
        groups=found.groups,
        expert_parallel=found.shape.experts,
        layer_parallel=found.shape.layers,
        shards=found.gpus,
        ttft_s=found.ttft_s,
        tpot_s=found.tpot_s,
    )


def _check_size(served: Served) -> None:
    """What would be reckoned for hours is refused at once."""
    demand = served.demand
    adapters, slots = len(demand.rates), reach(demand.offered, np.ones_like(demand.num_bytes))
    if adapters * slots > MOST_SUMS:
        told = f"found {adapters}, of which up to {slots} are in use at once"
        raise InvalidRequest(f"{told}; wanted {MOST_SUMS:g} at most, one times the other", param="adapters")


def _check(goal: Goal, means: Means) -> None:
    if not 0 < goal.iar < 1:
        raise InvalidRequest(f"found {goal.iar:g}; wanted a share between 0 and 1, both excluded", param="iar")
    positive(goal.ttft_s, "slo_ttft")
    positive(goal.tpot_s, "slo_tpot")
    if not 0 < means.gpu_bytes <= MAX_BYTES:
        raise InvalidRequest(
            f"found {means.gpu_bytes:g}; wanted a number above 0, {MAX_BYTES:.2e} at most", param="gpu_bytes"
        )
    for param, value in (
        ("margin", goal.margin),
        ("engines", means.engines),
        ("spare_groups", means.spare_groups),
        ("gpu_price", means.gpu_price),
    ):
        if not 0 <= value <= MAX_NUMBER:
            raise InvalidRequest(f"found {value:g}; wanted a number from 0 to {MAX_NUMBER:g}", param=param)
