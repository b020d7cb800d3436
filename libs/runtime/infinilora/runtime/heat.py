"""Decayed counts as logarithms that time does not change: what the store keeps of heat. Pure.

    score = log2( sum over all requests of 2^(came_at / half_life) )

Time takes the same off every score, so none is touched while nobody asks: a sorted set has the hottest in order at any
moment, and its top is read without the rest. Adding is commutative, so writers need not agree on an order. `came_at` is
in seconds since LANDMARK on the store's own clock: no writer's clock counts.

A score of today is below 2^22 in half-lives of ten seconds, so each addition rounds it to 5e-10, and a rate by as much.
"""

from collections.abc import Iterable
from math import log, log2

from infinilora.protocol.ids import Digest

LANDMARK_S = 1_767_225_600
"""2026-01-01, in seconds since 1970: scores stay small, and so exact, for some decades."""
COLD = 1e-3
"""What has decayed to fewer requests than this is forgotten: ten half-lives after a single one."""
MOST = 2.0**30
"""Decayed requests that nobody has: a score of more was made on a clock that has been set back since. Those are not
believed, and are taken out by the next addition: what is added to one would not show for as long as it was set back."""
FORGOTTEN = 1000
"""Cold ones that one addition takes out, at most: more than it adds, so that they never pile up."""


def score_of(count: float, came_at: float, half_life_s: float) -> float:
    """Of `count` requests, more than none, at `came_at` (seconds since LANDMARK)."""
    return log2(count) + came_at / half_life_s


def added(score: float, other: float) -> float:
    """The score of both together."""
    high, low = max(score, other), min(score, other)
    return float(high + log2(1 + 2 ** (low - high)))


def cold_below(now: float, half_life_s: float) -> float:
    """The score from which an adapter is not cold now."""
    return log2(COLD) + now / half_life_s


def believed_below(now: float, half_life_s: float) -> float:
    """The score from which on nothing is believed now."""
    return log2(MOST) + now / half_life_s


def rates(ranked: Iterable[tuple[Digest, float]], now: float, half_life_s: float) -> dict[Digest, float]:
    """Decayed requests per second of those that are not cold, and believed, from their scores, in the order given.

    A steady rate r ends at a decayed count of r * half_life / ln 2.
    """
    cold, most = cold_below(now, half_life_s), believed_below(now, half_life_s)
    return {
        digest: float(2 ** (score - now / half_life_s) * log(2) / half_life_s)
        for digest, score in ranked
        if cold <= score < most
    }
