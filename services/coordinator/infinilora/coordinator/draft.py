"""A placement while it is worked on: put a copy, drop one, take both back, and the cost always known. Pure.

Adapters and groups are numbers here, in the order of their names: nothing depends on the order of the arguments.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from infinilora.coordinator.costs import Costs
from infinilora.protocol.ids import Digest

BYTES_WEIGH = 0.25
"""How much a full group counts as a busy one when a place is looked for: room everywhere is worth something."""


@dataclass(frozen=True, slots=True)
class Group:
    """A LoRA server group. `speed` is relative; two groups of one `host` fall together (empty: alone on its host)."""

    id: str
    bytes_total: int
    speed: float = 1.0
    host: str = ""
    state: Literal["ready", "draining", "dead"] = "ready"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter to be placed, on `copies` groups if there are as many."""

    digest: Digest
    num_bytes: int
    rps: float = 0.0
    is_pinned: bool = False
    copies: int = 1


class Budget:
    """Tries that are left."""

    def __init__(self, tries: int) -> None:
        self.left = tries

    def spend(self, count: int = 1) -> bool:
        self.left -= count
        return self.left >= 0


class Mark(NamedTuple):
    """A plan to go back to."""

    num_done: int
    homeless_pins: int
    cost: float


class Draft:
    """What is where. `free` is never below 0 and no adapter is twice in a group, or too often on a host.

    `where[a]` are the groups of adapter a, which share its requests alike; `by_worth[g]` the adapters of group g by
    what a byte of them is worth, least first; `cost` is the whole plan's, of `costs`, pins apart.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        adapters: Sequence[Adapter],
        homes: Mapping[int, tuple[int, ...]],
        costs: Costs,
        *,
        fill: float,
    ) -> None:
        self.costs = costs
        self.adapters = adapters
        self.homes = homes
        self.num_bytes = [adapter.num_bytes for adapter in adapters]
        self.rps = [adapter.rps for adapter in adapters]
        self.copies = [min(max(adapter.copies, 1), max(len(groups), 1)) for adapter in adapters]
        missing_s = {size: costs.missing_s(size) for size in set(self.num_bytes)}
        self._missing = [
            rps * missing_s[size] if rps else 0.0 for rps, size in zip(self.rps, self.num_bytes, strict=True)
        ]
        self._per_byte = [
            inf if a.is_pinned else missing / max(a.num_bytes, 1)
            for a, missing in zip(adapters, self._missing, strict=True)
        ]
        self._leaving = {a: self._leave(a) for a in homes}
        self.where: list[tuple[int, ...]] = [()] * len(adapters)
        self.capacity = [int(group.bytes_total * fill) for group in groups]
        self.largest = max(self.capacity, default=-1)
        self._room = [max(capacity, 1) for capacity in self.capacity]
        self.free = list(self.capacity)
        self.load = [0.0] * len(groups)
        total_rps, total_speed = sum(self.rps), sum(group.speed for group in groups)
        self.fair = [total_rps * group.speed / total_speed for group in groups]
        self.by_worth: list[list[tuple[float, int]]] = [[] for _ in groups]
        hosts = {host: number for number, host in enumerate(dict.fromkeys(g.host or f"\0{g.id}" for g in groups))}
        self._host = [hosts[group.host or f"\0{group.id}"] for group in groups]
        self._num_hosts = len(hosts)
        self.homeless_pins = sum(adapter.is_pinned for adapter in adapters)
        self._on_host: dict[tuple[int, int], int] = {}
        self._crowding = [0.0] * len(groups)
        self._done: list[tuple[int, int, bool]] = []
        self.cost = sum(self._missing) + sum(self._leaving[a] * len(held) for a, held in homes.items())

    def can_hold(self, group: int, a: int) -> bool:
        """Whether this adapter may have one more copy, in this group."""
        return self.num_bytes[a] <= self.free[group] and self.may_hold(group, a)

    def may_hold(self, group: int, a: int) -> bool:
        """The same, were there room: copies are spread over hosts as evenly as their number has it."""
        where = self.where[a]
        if not where:
            return True
        if group in where or len(where) >= self.copies[a]:
            return False
        return self._on_host.get((a, self._host[group]), 0) < -(-self.copies[a] // self._num_hosts)

    def lay(self, a: int, group: int) -> None:
        """Its first copy, in a group that has room; never to be undone. The caller ends with `crowd`."""
        self.free[group] -= self.num_bytes[a]
        self.where[a] = (group,)
        insort(self.by_worth[group], (self.worth(a, 1), a))
        if self.copies[a] > 1:
            self._on_host[a, self._host[group]] = 1
        if self.adapters[a].is_pinned:
            self.homeless_pins -= 1
        if a in self._leaving and group in self.homes[a]:
            self.cost -= self._leaving[a]
        if self.rps[a]:
            self.cost += self._lacking(a, 1) - self._missing[a]
            self.load[group] += self.rps[a]

    def crowd(self) -> None:
        """Price all that `lay` has put into the groups."""
        for group in range(len(self.load)):
            self._price(group)

    def put(self, a: int, group: int) -> None:
        """One copy more. The caller has asked `can_hold`."""
        self.free[group] -= self.num_bytes[a]
        self._done.append((a, group, True))
        self._change(a, group, self.where[a], (*self.where[a], group))

    def drop(self, a: int, group: int) -> None:
        """One copy less."""
        self.free[group] += self.num_bytes[a]
        self._done.append((a, group, False))
        self._change(a, group, self.where[a], tuple(other for other in self.where[a] if other != group))

    def mark(self) -> Mark:
        """Now, for `keep` and `undo`."""
        return Mark(len(self._done), self.homeless_pins, self.cost)

    def keep(self, mark: Mark) -> bool:
        """Whether the plan is better than at the mark, by more than rounding. If not, it is that plan again."""
        if self.homeless_pins < mark.homeless_pins:
            return True
        if self.homeless_pins == mark.homeless_pins and self.cost < mark.cost * (1 - 1e-9):
            return True
        self.undo(mark)
        return False

    def undo(self, mark: Mark) -> None:
        """All that was done since, backwards."""
        while len(self._done) > mark.num_done:
            a, group, was_put = self._done[-1]
            (self.drop if was_put else self.put)(a, group)
            del self._done[-2:]
        self.cost = mark.cost

    def worth(self, a: int, placed: int) -> float:
        """Per byte, of the copy that makes `placed` copies; infinite for a pinned adapter's only one."""
        if self.copies[a] == 1 or not self.rps[a] or (placed <= 1 and self.adapters[a].is_pinned):
            return self._per_byte[a] if placed <= 1 else 0.0
        return (self._lacking(a, placed - 1) - self._lacking(a, placed)) / max(self.num_bytes[a], 1)

    def busyness(self, group: int, more: float = 0.0) -> float:
        """Its load, and `more` requests/s, against an even spread."""
        return (self.load[group] + more) / self.fair[group] if self.fair[group] else 0.0

    def occupation(self, group: int, more_rps: float = 0.0, more_bytes: int = 0) -> float:
        """How busy and how full: a new copy goes where this is least."""
        full = 1 - (self.free[group] - more_bytes) / self._room[group]
        return self.busyness(group, more_rps) + BYTES_WEIGH * full

    def occupation_with(self, group: int, a: int) -> float:
        """What `occupation` becomes with a copy of this adapter."""
        return self.occupation(group, self.rps[a] / (len(self.where[a]) + 1), self.num_bytes[a])

    def _change(self, a: int, group: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        self.where[a] = after
        is_more = len(after) > len(before)
        if self.adapters[a].is_pinned and not (before and after):
            self.homeless_pins += -1 if is_more else 1
        if self.copies[a] > 1:
            on_host = a, self._host[group]
            self._on_host[on_host] = self._on_host.get(on_host, 0) + (1 if is_more else -1)
        self._rank(a, group, before, is_more=is_more)
        if a in self.homes and group in self.homes[a]:
            self.cost += -self._leaving[a] if is_more else self._leaving[a]
        if self.rps[a]:
            self.cost += self._lacking(a, len(after)) - self._lacking(a, len(before))
            self._share(a, group, before, after)

    def _share(self, a: int, group: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        had = self.rps[a] / len(before) if before else 0.0
        has = self.rps[a] / len(after) if after else 0.0
        is_more = len(after) > len(before)
        for other in after if is_more else before:
            if other != group:
                self.load[other] += has - had
            else:
                self.load[other] += has if is_more else -had
            self._price(other)

    def _price(self, group: int) -> None:
        """Have `cost` know how crowded a group is now."""
        crowding = self.costs.crowding(self.load[group], self.fair[group])
        self.cost += crowding - self._crowding[group]
        self._crowding[group] = crowding

    def _rank(self, a: int, group: int, before: tuple[int, ...], *, is_more: bool) -> None:
        """Keep `by_worth`: what one copy is worth depends on how many there are."""
        after = self.where[a]
        was, now = self.worth(a, len(before)), self.worth(a, len(after))
        if was != now and before and after:
            for other in before:
                if other != group:
                    self._unrank(other, was, a)
                    insort(self.by_worth[other], (now, a))
        if is_more:
            insort(self.by_worth[group], (now, a))
        else:
            self._unrank(group, was, a)

    def _unrank(self, group: int, worth: float, a: int) -> None:
        del self.by_worth[group][bisect_left(self.by_worth[group], (worth, a))]

    def _lacking(self, a: int, placed: int) -> float:
        if not placed:
            return self._missing[a]
        return self._missing[a] * self.costs.copy_worth * (self.copies[a] - placed) / self.copies[a]

    def _leave(self, a: int) -> float:
        adapter = self.adapters[a]
        return self.costs.leaving(adapter.rps, adapter.num_bytes, self.copies[a], is_pinned=adapter.is_pinned)
