"""Which engine takes a sequence. Pure: a function of what is known, with no clock, no dice and no I/O.

Filter, score, pick. An engine must be alive, of the right base, not draining, and not one that this sequence
has already failed on. Of those the least loaded wins; holding the adapter already is worth `WARM_BONUS`
sequences, and an engine that failed somebody a moment ago is taken only when nobody else is left.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from infinilora.protocol.ids import Digest, Fingerprint

WARM_BONUS = 2.0
"""An engine that leases the adapter may be this many sequences busier and still be preferred."""
SUSPECT_PENALTY = 1000.0


class EngineView(NamedTuple):
    """One engine as the gateway sees it: its last heartbeat, and what this gateway has sent since."""

    key: str
    base: Fingerprint
    is_draining: bool
    is_suspect: bool
    running: int
    waiting: int
    in_flight: int
    kv_free: float
    digests: frozenset[Digest]


def eligible(engines: Sequence[EngineView], base: Fingerprint, avoid: Collection[str]) -> list[EngineView]:
    return [e for e in engines if e.base == base and not e.is_draining and e.key not in avoid]


def score(engine: EngineView, digest: Digest | None) -> float:
    """Higher is better. Load counts what either side knows of; waiting sequences weigh double."""
    load = max(engine.running + engine.waiting, engine.in_flight) + engine.waiting
    crowding = 1.0 - engine.kv_free
    warmth = WARM_BONUS if digest is not None and digest in engine.digests else 0.0
    penalty = SUSPECT_PENALTY if engine.is_suspect else 0.0
    return warmth - load - crowding - penalty


def pick(
    engines: Sequence[EngineView], base: Fingerprint, digest: Digest | None, avoid: Collection[str] = ()
) -> EngineView | None:
    """The best engine for a sequence; ties go to the smallest key. None when there is none."""
    found = eligible(engines, base, avoid)
    return min(found, key=lambda e: (-score(e, digest), e.key), default=None)
