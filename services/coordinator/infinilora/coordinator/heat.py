"""What heat says about adapters. Pure: decayed requests per second in, decisions out.

A decayed rate of one half-life forgets half of what it knew in that time: a short one follows, a long one remembers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from math import inf, log, log2

from infinilora.protocol.ids import Digest

COOLING = 0.5
"""An adapter keeps a copy until its heat has fallen to this share of what called for it: no flapping."""
RISING = 2.0
"""A short half-life's rate over the longest one's, from which an adapter rises."""
ENOUGH = 4.0
"""Requests, decayed, that a rate must rest on before it says anything: one alone looks like a rise."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Where an adapter's heat goes: its latest rate, and how many doublings that lies over the longest view."""

    digest: Digest
    rps: float
    doublings: float
    is_rising: bool


def copies(rps: float, hot_rps: float, had: int) -> int:
    """On how many groups an adapter should be: one more for each `hot_rps`; those it had go later than they came."""
    wanted = 1 + int(rps / hot_rps)
    kept = 1 + int(rps / (hot_rps * COOLING))
    return max(wanted, min(had, kept))


def hot_spots(heat: Mapping[Digest, float], hot_rps: float, had: Mapping[Digest, int]) -> dict[Digest, int]:
    """The adapters that deserve more than one group, and how many, given how many they had."""
    wanted = {digest: copies(rps, hot_rps, had.get(digest, 0)) for digest, rps in heat.items()}
    return {digest: count for digest, count in wanted.items() if count > 1}


def top(heat: Mapping[Digest, float], count: int) -> list[Digest]:
    """The hottest, hottest first; of equal heat, by digest."""
    return nsmallest(count, heat, key=lambda digest: (-heat[digest], digest))


def drift(digest: Digest, rates: Mapping[float, float]) -> Drift:
    """One adapter's drift from its rates by half-life in seconds; of one half-life, or of no heat, there is none.

    It rises if its shortest view that rests on enough requests sees at least RISING times what the longest sees.
    """
    if not rates:
        return Drift(digest, 0.0, 0.0, is_rising=False)
    longest = rates[max(rates)]
    latest = next((rates[h] for h in sorted(rates) if requests(rates[h], h) >= ENOUGH), longest)
    if latest <= 0:
        return Drift(digest, 0.0, 0.0, is_rising=False)
    doublings = log2(latest / longest) if longest > 0 else inf
    return Drift(digest, latest, doublings, is_rising=doublings >= log2(RISING))


def requests(rps: float, half_life_s: float) -> float:
    """How many requests, counted by what is left of each, a decayed rate rests on."""
    return rps * half_life_s / log(2)
