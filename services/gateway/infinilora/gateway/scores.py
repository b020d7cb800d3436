"""Which engine takes a sequence. Pure: a function of what is known, with no clock, no dice and no I/O.

Filter, score, pick. An engine must be alive, ready, of the right base, not known to be unreachable, and not one that
this sequence has just failed on. Of those the best score wins, and every term of it is counted in sequences: how much
busier an engine may be and still be preferred. Why each is worth what it is: docs/decisions/0009.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from infinilora.protocol.ids import Digest, Fingerprint

WARM_BONUS = 2.0
PREFIX_TOKENS = 256
"""Tokens of a prompt that need not be computed again, for one sequence's worth of preference."""
MAX_PREFIX_BONUS = 4.0
SUSPECT_PENALTY = 1000.0


class EngineView(NamedTuple):
    """One life of an engine as the gateway sees it: its last heartbeat, and what this gateway knows from its calls.

    `digests`: adapters that it leases or holds. `is_open`: its circuit breaker is.
    """

    key: str
    base: Fingerprint | None
    is_alive: bool
    is_draining: bool
    is_suspect: bool
    is_open: bool
    running: int
    waiting: int
    in_flight: int
    kv_free: float
    digests: frozenset[Digest]


class Wanted(NamedTuple):
    """What a sequence asks for. `matches`: engines that computed its adapter here before, with the tokens in common."""

    base: Fingerprint
    digest: Digest | None
    matches: Mapping[str, int] = MappingProxyType({})
    avoid: Collection[str] = ()


def is_eligible(engine: EngineView, wanted: Wanted) -> bool:
    is_there = engine.is_alive and not engine.is_draining and not engine.is_open
    return is_there and engine.base == wanted.base and engine.key not in wanted.avoid


def score(engine: EngineView, wanted: Wanted) -> float:
    """Higher is better. Load counts what either side knows of; waiting sequences weigh double."""
    load = max(engine.running + engine.waiting, engine.in_flight) + engine.waiting
    crowding = 1.0 - engine.kv_free
    is_warm = wanted.digest in engine.digests or engine.key in wanted.matches
    warmth = WARM_BONUS if wanted.digest is not None and is_warm else 0.0
    prefix = min(wanted.matches.get(engine.key, 0) / PREFIX_TOKENS, MAX_PREFIX_BONUS)
    penalty = SUSPECT_PENALTY if engine.is_suspect else 0.0
    return warmth + prefix - load - crowding - penalty


def pick(engines: Sequence[EngineView], wanted: Wanted) -> EngineView | None:
    """The best engine for a sequence; ties go to the smallest key. None when there is none."""
    found = [engine for engine in engines if is_eligible(engine, wanted)]
    return min(found, key=lambda engine: (-score(engine, wanted), engine.key), default=None)
