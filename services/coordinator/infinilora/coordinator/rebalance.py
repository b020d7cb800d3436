"""What a plan would change, and why, as an operator reads it. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from infinilora.coordinator.placement import Adapter, Plan, Reason, Table, by_adapter, reason_of
from infinilora.protocol.ids import Digest

MAX_SHOWN = 1000
"""Moves that are listed, the hottest first; all are counted."""


class Move(NamedTuple):
    """One adapter whose groups change. `num_bytes`: what is brought into the groups that did not have it."""

    digest: Digest
    reason: Reason
    before: tuple[str, ...]
    after: tuple[str, ...]
    rps: float
    num_bytes: int


class Difference(NamedTuple):
    """All of them, hottest first, and how many adapters there are of each reason."""

    moves: list[Move]
    reasons: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(move.num_bytes for move in self.moves)


def difference(plan: Plan, adapters: Mapping[Digest, Adapter], told: Table) -> Difference:
    """From what engines are told now to a plan of the same adapters."""
    before = by_adapter(told)
    moves, reasons = [], Counter[str]()
    for digest, home in plan.items():
        was, now = before.get(digest, ()), tuple(sorted(home.groups))
        reason = reason_of(set(was), set(now)) if now else home.reason
        reasons[reason] += 1
        if was != now:
            adapter = adapters[digest]
            new = len(set(now) - set(was))
            moves.append(Move(digest, reason, was, now, adapter.rps, new * adapter.num_bytes))
    moves.sort(key=lambda move: (-move.rps, move.digest))
    return Difference(moves, dict(sorted(reasons.items())))
