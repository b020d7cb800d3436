"""The oracle of seeded sampling: by how much a token lies outside the interval that the dice fell into.

Plain code of its own: the generator and the walk over the cumulative distribution are written again here.
"""

from collections import Counter

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) of (seed, token index): splitmix64 of the seed, then of that and the index."""
    mixed = (_mix(seed) + index * 0x9E3779B97F4A7C15) & _MASK
    return (_mix(mixed) >> 11) / (1 << 53)


def outside(
    logits: Tensor, produced: list[int], *, seed: int, temperature: float, frequency_penalty: float = 0.0
) -> float:
    """The most, over all positions, that u lies outside the token's part of the distribution; logits [len, vocab].

    Row i is what the model says before `produced[i]`.
    """
    worst, counts = 0.0, Counter[int]()
    for index, (row, token) in enumerate(zip(logits.double(), produced, strict=True)):
        for seen, times in counts.items():
            row[seen] -= frequency_penalty * times
        ends = torch.softmax(row / temperature, -1).cumsum(-1)
        low, high = float(ends[token - 1]) if token else 0.0, float(ends[token])
        u = uniform(seed, index)
        worst = max(worst, low - u, u - high)
        counts[token] += 1
    return worst


def _mix(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
