"""How requests spread over adapters: a law, or weights that someone knows."""

import numpy as np
from numpy.typing import NDArray

from infinilora.protocol.errors import InvalidRequest

Floats = NDArray[np.float64]


def zipf(num_adapters: int, exponent: float) -> Floats:
    """Shares of requests, the most popular first: the i-th in proportion to i^-exponent. 0 makes all alike."""
    if num_adapters < 1:
        raise InvalidRequest(f"found {num_adapters}; wanted 1 or more", param="adapters")
    if not 0 <= exponent < np.inf:
        raise InvalidRequest(f"found {exponent}; wanted a number, 0 or more", param="zipf")
    return shares(np.arange(1, num_adapters + 1, dtype=np.float64) ** -exponent)


def shares(weights: Floats) -> Floats:
    """Weights of any unit as shares that sum to 1. InvalidRequest unless they are finite, >= 0 and not all 0."""
    weights = np.asarray(weights, dtype=np.float64)
    odd = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if odd.size:
        raise InvalidRequest(f"number {odd[0]}: found {weights[odd[0]]}; wanted 0 or more", param="weights")
    with np.errstate(over="ignore"):
        total = float(weights.sum())
    if not 0 < total < np.inf:
        raise InvalidRequest(f"found a sum of {total}; wanted more than 0, and finite", param="weights")
    return weights / total
