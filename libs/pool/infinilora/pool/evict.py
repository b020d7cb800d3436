"""Which resident adapters to give up when another needs room. Pure: no clock, no tensors, no I/O.

An adapter is worth keeping for the time that its next use would cost, per byte it occupies:

    worth = heat [1/s] * reload_s [s] / num_bytes

The least worth goes first. Pinned adapters and those in use are never chosen.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from infinilora.protocol.ids import Digest

HALF_LIFE_S = 60.0
MAX_REMEMBERED = 4096


class Heat:
    """Decayed uses of each digest (half-life HALF_LIFE_S). Told the time; forgets the longest unused past its limit."""

    def __init__(self) -> None:
        self._scores: dict[Digest, tuple[float, float]] = {}

    def warm(self, digest: Digest, now: float) -> None:
        """Count one use."""
        score, stamp = self._scores.pop(digest, (0.0, now))
        self._scores[digest] = (score * math.exp2((stamp - now) / HALF_LIFE_S) + 1.0, now)
        if len(self._scores) > MAX_REMEMBERED:
            del self._scores[next(iter(self._scores))]

    def of(self, digest: Digest, now: float) -> float:
        """Uses per second: a steady rate r settles at r."""
        score, stamp = self._scores.get(digest, (0.0, now))
        return score * math.exp2((stamp - now) / HALF_LIFE_S) * math.log(2) / HALF_LIFE_S


@dataclass(frozen=True, slots=True)
class Candidate:
    """What eviction may know of one resident adapter. `heat`: decayed uses per second."""

    digest: Digest
    num_bytes: int
    heat: float
    reload_s: float
    is_pinned: bool = False
    in_use: bool = False

    @property
    def worth(self) -> float:
        return self.heat * self.reload_s / max(1, self.num_bytes)

    @property
    def is_evictable(self) -> bool:
        return not (self.is_pinned or self.in_use)


def choose_victims(candidates: Iterable[Candidate], *, need_bytes: int, need_slots: int) -> tuple[Digest, ...] | None:
    """The adapters whose going frees `need_bytes` and `need_slots`, least worth first; None if all are not enough.

    No victim is superfluous: whoever is taken early and is no longer needed once a larger one has gone stays.
    """
    by_worth = sorted((c for c in candidates if c.is_evictable), key=lambda c: (c.worth, c.digest))
    chosen: list[Candidate] = []
    freed = 0
    for candidate in by_worth:
        if freed >= need_bytes and len(chosen) >= need_slots:
            break
        chosen.append(candidate)
        freed += candidate.num_bytes
    if freed < need_bytes or len(chosen) < need_slots:
        return None
    for candidate in reversed(tuple(chosen)):
        if freed - candidate.num_bytes >= need_bytes and len(chosen) > need_slots:
            chosen.remove(candidate)
            freed -= candidate.num_bytes
    return tuple(c.digest for c in chosen)
