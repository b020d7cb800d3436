"""What a plan would change, and why, as an operator reads it. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from infinilora.coordinator.placement import Adapter, Plan, Reason, Table, by_adapter, reason_of
from infinilora.protocol.ids import Digest

MAX_SHOWN = 1000
"""Adapters that are listed, of the plan and of what moves; all are counted."""


class Move(NamedTuple):
    """Where one adapter is and is to be. `num_bytes`: what is brought into the groups that did not have it."""

    digest: Digest
    reason: Reason
    before: tuple[str, ...]
    after: tuple[str, ...]
    rps: float
    num_bytes: int


class Difference(NamedTuple):
    """The whole plan, those whose groups change first, each hottest first; how many of each reason; how many change."""

    plan: list[Move]
    reasons: dict[str, int]
    num_moves: int

    @property
    def moves(self) -> list[Move]:
        return self.plan[: self.num_moves]

    @property
    def num_bytes(self) -> int:
        return sum(move.num_bytes for move in self.moves)


def difference(plan: Plan, adapters: Mapping[Digest, Adapter], told: Table) -> Difference:
    """From what engines are told now to a plan of the same adapters."""
    before, homes = by_adapter(told), list[Move]()
    for digest, home in plan.items():
        was, now, adapter = before.get(digest, ()), tuple(sorted(home.groups)), adapters[digest]
        reason = reason_of(set(was), set(now)) if now else home.reason
        homes.append(Move(digest, reason, was, now, adapter.rps, len(set(now) - set(was)) * adapter.num_bytes))
    homes.sort(key=lambda home: (home.before == home.after, -home.rps, home.digest))
    reasons = Counter[str](home.reason for home in homes)
    return Difference(homes, dict(sorted(reasons.items())), sum(home.before != home.after for home in homes))
