"""Which resident adapters to give up when another needs room. Pure: no clock, no tensors, no I/O.

An adapter is worth keeping for the time that its next use would cost, per byte it occupies:

    worth = heat [1/s] * reload_s [s] / num_bytes

The least worth goes first. Pinned adapters and those in use are never chosen.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from infinilora.protocol.ids import Digest


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
