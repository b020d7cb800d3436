"""The dice: one uniform number for each (seed, token index), the same in any batch, on any engine.

A counter-based generator: no state, so a sequence that moves to another engine goes on exactly.
"""

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """u[i] in [0, 1) from seeds[i] and indices[i], 53 bits each (splitmix64 over the seed, then the index)."""
    return (_mix(_mix(seeds) + indices * _STEP) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = values + _STEP
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
