"""What heat says about adapters. Pure: a mapping of decayed requests per second in, decisions out."""

from collections.abc import Mapping

from infinilora.protocol.ids import Digest

COOLING = 0.5
"""A hot adapter stays hot until its heat has fallen to this share of the threshold: no flapping."""


def is_hot(rps: float, hot_rps: float, *, was_hot: bool) -> bool:
    """Whether one adapter's heat calls for a second copy."""
    return rps >= hot_rps * (COOLING if was_hot else 1.0)


def hot_spots(heat: Mapping[Digest, float], hot_rps: float, was_hot: frozenset[Digest]) -> frozenset[Digest]:
    """The adapters that deserve more than one group, given those that had it before."""
    return frozenset(d for d, rps in heat.items() if is_hot(rps, hot_rps, was_hot=d in was_hot))
