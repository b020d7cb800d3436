"""What a placement costs, written from the words of docs/decisions/0006-placement.md and from nothing of the policy's.

Also the same as a mixed integer programme, for an exact solver.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import highspy

from infinilora.coordinator.costs import Costs
from infinilora.coordinator.placement import Adapter, Group
from infinilora.protocol.ids import Digest

Table = Mapping[str, Sequence[Digest]]
TANGENTS = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 3, 4)
HOMELESS_PIN = 1e4
"""Of the exact programme only: dearer than any plan of these tests."""


@dataclass(frozen=True)
class Problem:
    groups: Sequence[Group]
    adapters: Sequence[Adapter]
    current: Table
    fill: float
    costs: Costs

    @property
    def ready(self) -> list[Group]:
        return [group for group in self.groups if group.state == "ready"]

    def capacity(self, group: Group) -> int:
        return math.floor(group.bytes_total * self.fill)

    def copies(self, adapter: Adapter) -> int:
        return min(adapter.copies, len(self.ready))

    def per_host(self, adapter: Adapter) -> int:
        """The most copies that one host may have."""
        return math.ceil(self.copies(adapter) / len({host_of(group) for group in self.ready}))

    def missing_s(self, adapter: Adapter) -> float:
        """What each request of an adapter that is nowhere loses."""
        steepest = 2 * 4
        return self.loading_s(adapter) + steepest * self.costs.wait_s

    def loading_s(self, adapter: Adapter) -> float:
        return self.costs.load_s + adapter.num_bytes / self.costs.load_bytes_per_s

    def lacking(self, adapter: Adapter, placed: int) -> float:
        all_of_them = adapter.rps * self.missing_s(adapter)
        if placed == 0:
            return all_of_them
        return all_of_them * self.costs.copy_worth * (1 - placed / self.copies(adapter))

    def leaving(self, adapter: Adapter) -> float:
        moving = self.loading_s(adapter) / self.costs.horizon_s
        if adapter.is_pinned:
            return moving
        return min(moving, self.costs.stay * adapter.rps * self.missing_s(adapter) / self.copies(adapter))

    def fair(self, group: Group) -> float:
        """The requests/s of this group if all were spread by speed."""
        total = math.fsum(adapter.rps for adapter in self.adapters)
        return total * group.speed / math.fsum(other.speed for other in self.ready)

    def homes(self) -> list[tuple[Adapter, Group]]:
        return [(a, g) for g in self.ready for a in self.adapters if a.digest in self.current.get(g.id, ())]


def host_of(group: Group) -> tuple[str, str]:
    return ("host", group.host) if group.host else ("group", group.id)


def cost(problem: Problem, table: Table) -> float:
    """The whole plan's, pins apart."""
    where = {a.digest: [g for g, held in table.items() if a.digest in held] for a in problem.adapters}
    parts = [problem.lacking(adapter, len(where[adapter.digest])) for adapter in problem.adapters]
    for group in problem.ready:
        load = math.fsum(a.rps / len(where[a.digest]) for a in problem.adapters if group.id in where[a.digest])
        fair = problem.fair(group)
        if fair:
            ratio = load / fair
            parts.append(problem.costs.wait_s * fair * max(2 * t * ratio - t * t for t in TANGENTS))
    parts += [problem.leaving(adapter) for adapter, group in problem.homes() if group.id not in where[adapter.digest]]
    return math.fsum(parts)


def homeless_pins(problem: Problem, table: Table) -> int:
    placed = {digest for held in table.values() for digest in held}
    return sum(adapter.is_pinned and adapter.digest not in placed for adapter in problem.adapters)


def faults(problem: Problem, table: Table) -> list[str]:
    """What no plan may do."""
    found = []
    sizes = {adapter.digest: adapter.num_bytes for adapter in problem.adapters}
    ready = {group.id: group for group in problem.ready}
    if set(table) != set(ready):
        found.append(f"groups {sorted(table)}; ready are {sorted(ready)}")
    for name, held in table.items():
        if len(set(held)) != len(held):
            found.append(f"{name} holds an adapter twice")
        if name in ready and sum(sizes[digest] for digest in held) > problem.capacity(ready[name]):
            found.append(f"{name} is overfull")
    for adapter in problem.adapters:
        on = [ready[name] for name, held in table.items() if adapter.digest in held and name in ready]
        if len(on) > max(problem.copies(adapter), 1):
            found.append(f"{adapter.digest} has {len(on)} copies of {problem.copies(adapter)}")
        hosts = [host_of(group) for group in on]
        if on and max(hosts.count(host) for host in hosts) > problem.per_host(adapter):
            found.append(f"{adapter.digest} is too often on one host: {hosts}")
    return found


def cheapest(problem: Problem) -> tuple[float, Table]:
    """The least cost that any plan of as few homeless pins as possible has, and such a plan. By HiGHS."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_rel_gap", 0.0)
    ready, terms = problem.ready, []
    held = {(a.digest, g.id): model.addBinary() for a in problem.adapters for g in ready}
    load: dict[str, list[Any]] = {group.id: [] for group in ready}
    for adapter in problem.adapters:
        mine = [held[adapter.digest, group.id] for group in ready]
        counts = [model.addBinary() for _ in range(problem.copies(adapter) + 1)]
        model.addConstr(sum(counts) == 1)
        model.addConstr(sum(mine) == sum(n * count for n, count in enumerate(counts)))
        terms += [problem.lacking(adapter, n) * count for n, count in enumerate(counts)]
        if adapter.is_pinned:
            terms.append(HOMELESS_PIN * counts[0])
        for host in {host_of(group) for group in ready}:
            there = [held[adapter.digest, group.id] for group in ready if host_of(group) == host]
            model.addConstr(sum(there) <= problem.per_host(adapter))
        for group, here in zip(ready, mine, strict=True):
            if len(counts) == 2:
                load[group.id].append(adapter.rps * here)
                continue
            share = model.addVariable(lb=0)
            for n, count in enumerate(counts[1:], 1):
                model.addConstr(share >= adapter.rps / n * (here + count - 1))
            load[group.id].append(share)
    for group in ready:
        model.addConstr(
            sum(a.num_bytes * held[a.digest, group.id] for a in problem.adapters) <= problem.capacity(group)
        )
        crowding, fair = model.addVariable(lb=0), problem.fair(group)
        for t in TANGENTS[1:]:
            model.addConstr(crowding >= 2 * t * sum(load[group.id]) - t * t * fair)
        terms.append(problem.costs.wait_s * crowding)
    terms += [problem.leaving(a) * (1 - held[a.digest, g.id]) for a, g in problem.homes()]
    model.minimize(1000 * sum(terms))
    values = {key: model.val(variable) for key, variable in held.items()}
    table = {g.id: tuple(sorted(a.digest for a in problem.adapters if values[a.digest, g.id] > 0.5)) for g in ready}
    return cost(problem, table), table
