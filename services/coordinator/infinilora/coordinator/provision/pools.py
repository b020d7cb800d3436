"""The bytes and slots that a demand needs: over one pool, or dealt to several groups that share nothing.

Each group holds its own adapters, so its pool is measured by itself: several small pools need more slots than
one large pool, and that loss is part of the answer.
"""

import math
from dataclasses import dataclass

import numpy as np

from infinilora.coordinator.provision.admission import Curve, Ints, curve, in_use, reach
from infinilora.coordinator.provision.popularity import Floats, shares

MAX_UNITS = 8192
"""Sizes without a common divisor are rounded up to a unit of 1/8192 of what could be in use: the answer then errs by
less than one unit for each adapter in use, and to the safe side."""
ROUNDING = 1e-9
"""50 x 1.1 is 55.00000000000001, and 55 slots are meant."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What one base is asked for: `rates` [N] requests a second, not all 0; `num_bytes` [N] of the same adapters."""

    rates: Floats
    num_bytes: Ints
    residence_s: float

    @property
    def offered(self) -> Floats:
        """Mean requests in flight of each adapter, [N]."""
        return self.rates * self.residence_s

    @property
    def in_flight(self) -> float:
        """Mean requests in flight."""
        return float(self.offered.sum())

    def part(self, members: list[tuple[int, float]]) -> "Demand":
        """What of it goes to one group: (index of an adapter, its requests a second there)."""
        chosen = np.array([index for index, _ in members], dtype=np.int64)
        return Demand(np.array([rate for _, rate in members]), self.num_bytes[chosen], self.residence_s)


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """A demand dealt to groups, and how much each refuses with a pool of so many units, the same for each."""

    groups: tuple[Demand, ...]
    curves: tuple[Curve, ...]
    unit_bytes: int

    @property
    def whole(self) -> int:
        """Units with which every group holds all that it is given."""
        return max(one.whole for one in self.curves)

    def refused(self, units: int) -> float:
        """1 - IAR over all requests."""
        weights = shares(np.array([group.in_flight for group in self.groups]))
        return float(weights @ [one.refused_with(units) for one in self.curves])

    def least(self, target: float) -> int:
        """The fewest units for each group with which IAR >= target over all requests."""
        low, high = 0, self.whole
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.refused(middle) <= 1.0 - target else (middle + 1, high)
        return low

    def with_margin(self, units: int, margin: float) -> int:
        """So many units and the safety margin on top; never more than everything."""
        return min(self.whole, math.ceil(units * (1 + margin) - ROUNDING))


def pools(demand: Demand, num_groups: int) -> Pools:
    """Deal a demand to groups and measure their pools in bytes."""
    groups = deal(demand, num_groups)
    return _measured(groups, unit_of(demand.num_bytes, max(reach(g.offered, g.num_bytes) for g in groups)))


def in_slots(found: Pools) -> Pools:
    """The same groups' pools in slots, whatever the adapters' sizes."""
    if all((group.num_bytes == found.unit_bytes).all() for group in found.groups):
        return found
    alike = (Demand(g.rates, np.ones_like(g.num_bytes), g.residence_s) for g in found.groups)
    return _measured(tuple(alike), 1)


def unit_of(num_bytes: Ints, reach_bytes: int) -> int:
    """The bytes of a unit: the sizes' greatest common divisor, or so many of it that MAX_UNITS suffice."""
    common = int(np.gcd.reduce(num_bytes))
    alike = common == int(num_bytes.max())
    return common if alike else common * math.ceil(reach_bytes / (common * MAX_UNITS))


def _measured(groups: tuple[Demand, ...], unit: int) -> Pools:
    sizes = [-(-group.num_bytes // unit) for group in groups]
    width = max(reach(group.offered, size) for group, size in zip(groups, sizes, strict=True))
    return Pools(groups, tuple(curve(g.offered, s, width) for g, s in zip(groups, sizes, strict=True)), unit)


def deal(demand: Demand, num_groups: int) -> tuple[Demand, ...]:
    """Give every adapter that is asked for to groups, most bytes in use first, to those with the least in use so far.

    An adapter with more than a group's even share of the requests is in as many groups as it fills.
    """
    even = float(demand.rates.sum()) / num_groups
    use = in_use(demand.offered) * demand.num_bytes
    loads = np.zeros(num_groups)
    members: list[list[tuple[int, float]]] = [[] for _ in range(num_groups)]
    for index in np.argsort(-use, kind="stable").tolist():
        rate = float(demand.rates[index])
        if rate == 0:
            continue
        copies = min(num_groups, max(1, math.ceil(rate / even - ROUNDING)))
        chosen = np.argsort(loads, kind="stable")[:copies]
        loads[chosen] -= math.expm1(-rate / copies * demand.residence_s) * float(demand.num_bytes[index])
        for group in chosen.tolist():
            members[group].append((index, rate / copies))
    return tuple(demand.part(given) for given in members if given)
