"""Which resident adapters to give up when another needs room. Pure: no clock, no tensors, no I/O.

An adapter is worth keeping for the time that its next use would cost, per byte it occupies:

    worth = heat [1/s] * reload_s [s] / num_bytes

The least worth goes first. Pinned adapters and those in use are never chosen: they are not in the order.

All heats fade alike, so who is worth less than whom never changes by time alone. The order is kept as its members come
and go, by the logarithm of their worth at time 0, and finding victims costs no more than there are of them.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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

    def level(self, digest: Digest) -> float:
        """log2 of the decayed uses at time 0: higher is hotter at any time. Never used: minus infinity."""
        score, stamp = self._scores.get(digest, (0.0, 0.0))
        return math.log2(score) + stamp / HALF_LIFE_S if score else -math.inf


class Candidate(NamedTuple):
    """A resident adapter that may go; in their natural order the least worth is first, ties by digest.

    `worth`: log2 of the worth above, at time 0.
    """

    worth: float
    digest: Digest
    num_bytes: int


def candidate(digest: Digest, num_bytes: int, *, level: float, reload_s: float) -> Candidate:
    """With `level` as `Heat` tells it."""
    return Candidate(level + math.log2(reload_s / max(1, num_bytes)), digest, num_bytes)


class EvictionOrder:
    """All that may be evicted, least worth first. A member keeps the worth that it came with."""

    def __init__(self) -> None:
        self._ranked: list[Candidate] = []
        self._members: dict[Digest, Candidate] = {}

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._ranked)

    def add(self, member: Candidate) -> None:
        """In place of what was told of its digest before."""
        self.discard(member.digest)
        self._members[member.digest] = member
        insort(self._ranked, member)

    def discard(self, digest: Digest) -> None:
        """Nothing happens if it is no member."""
        if member := self._members.pop(digest, None):
            del self._ranked[bisect_left(self._ranked, member)]


def choose_victims(by_worth: Iterable[Candidate], *, need_bytes: int, need_slots: int) -> tuple[Digest, ...] | None:
    """The adapters whose going frees `need_bytes` and `need_slots`, least worth first; None if all are not enough.

    No victim is superfluous: whoever is taken early and is no longer needed once a larger one has gone stays.
    """
    chosen: list[Candidate] = []
    freed = 0
    for each in by_worth:
        if freed >= need_bytes and len(chosen) >= need_slots:
            break
        chosen.append(each)
        freed += each.num_bytes
    if freed < need_bytes or len(chosen) < need_slots:
        return None
    for each in reversed(tuple(chosen)):
        if freed - each.num_bytes >= need_bytes and len(chosen) > need_slots:
            chosen.remove(each)
            freed -= each.num_bytes
    return tuple(each.digest for each in chosen)
