r"""The share of requests that find room for their adapter at once, for every size of the pool.

Requests for adapter i arrive as a Poisson process and stay for the residence time, so those in flight are
Poisson with mean m_i = rate_i x residence, whatever the law of the residence (M/G/infinity), and i is in use
with probability q_i = 1 - exp(-m_i), each adapter by itself. A request is admitted at once when its adapter is
in use already, or when what is in use leaves room for it:

    IAR(C) = sum_j p_j [ q_j + (1 - q_j) P(units in use by the others + size_j <= C) ]

That needs a pool which, on average, holds what is in use. In a smaller one the adapters in use themselves wait for
each other, so that being in use is no help, and only the second factor is left:

    IAR(C) = sum_j p_j P(units in use by the others + size_j <= C)        where C < sum_i q_i size_i

What is in use is Poisson-binomial (weighted by sizes). One pass over the adapters carries three rows, exactly:

    busy[w]   P(the adapters seen so far use w units)
    idle[w]   P(a request is for one of them, which is idle, and with it they would use w units)
    any[w]    the same, whether or not that one is in use

so 1 - IAR(C) is the sum of idle[w] (or any[w]) over w > C. Nothing is subtracted: small tails keep their digits.

All this holds while nobody waits behind a request that cannot be admitted (*bypass*). In first-in-first-out
order one such request holds up all that come after it, and the same pool serves far less than this says.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinilora.coordinator.provision.popularity import Floats, shares

Ints = NDArray[np.int64]

BUSY, IDLE, ANY = 0, 1, 2
FAR_SIGMAS, FAR_SIZES = 12.0, 40.0
"""So far above the mean use, in standard deviations plus largest adapters, less than 1e-25 is left (Bernstein)."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """refused[w] = 1 - IAR of a pool of w units, falling; for w >= `whole` everything fits and nothing is refused."""

    refused: Floats
    whole: int

    def refused_with(self, units: int) -> float:
        """1 - IAR of a pool of so many units. Between the end of what was computed and `whole`, an upper bound."""
        if units >= self.whole:
            return 0.0
        return float(self.refused[min(max(units, 0), len(self.refused) - 1)])

    def least(self, target: float) -> int:
        """The fewest units with IAR >= target."""
        enough = np.flatnonzero(self.refused <= 1.0 - target)
        return int(enough[0]) if enough.size else self.whole


def in_use(offered: Floats) -> Floats:
    """q: the probability that each adapter has a request in flight, for `offered` of them on average."""
    return -np.expm1(-offered)


def reach(offered: Floats, sizes: Ints) -> int:
    """Units beyond which the adapters in use practically never go; at most all of them."""
    q = in_use(offered)
    far = FAR_SIGMAS * float(np.sqrt((q * (1 - q) * sizes.astype(np.float64) ** 2).sum()))
    return min(int(sizes.sum()), int(np.ceil(float(q @ sizes) + far + FAR_SIZES * float(sizes.max()))))


def curve(offered: Floats, sizes: Ints, width: int | None = None) -> Curve:
    """`offered` [N]: mean requests in flight of each adapter, not all 0; `sizes` [N]: units it takes, 1 or more.

    `width` units are told apart; all that needs more falls into one bin. None: as far as matters.
    """
    rows, top = _rows(offered, sizes, min(width or reach(offered, sizes), int(sizes.sum())))
    beyond = np.cumsum(rows[IDLE:, : top + 1][:, ::-1], axis=1)[:, ::-1][:, 1:]
    whole = int(sizes.sum())
    if top == whole:
        beyond = np.append(beyond, [[0.0], [0.0]], axis=1)
    holds_use = np.arange(beyond.shape[1]) >= float(in_use(offered) @ sizes)
    return Curve(np.where(holds_use, beyond[0], beyond[1]), whole)


def _rows(offered: Floats, sizes: Ints, last: int) -> tuple[Floats, int]:
    """The rows busy, idle and any, [3, last + 1], and the highest bin in use. Bin `last` holds `last` units or more."""
    share, busy, idle = shares(offered), in_use(offered), np.exp(-offered)
    rows = np.zeros((3, last + 1))
    rows[BUSY, 0] = 1.0
    top = 0
    for p, q, r, size in zip(share.tolist(), busy.tolist(), idle.tolist(), sizes.tolist(), strict=True):
        kept = max(min(top, last - size) + 1, 0)
        ends = rows[:, kept : top + 1].sum(axis=1)  # with this adapter, these reach past the last bin
        moved = rows[:, :kept] * q
        moved[IDLE] += (p * r) * rows[BUSY, :kept]
        moved[ANY] += p * rows[BUSY, :kept]
        rows[:, : top + 1] *= r
        rows[:, size : size + kept] += moved
        if top + size > last:
            rows[:, last] += q * ends
            rows[IDLE:, last] += np.array([p * r, p]) * ends[BUSY]
        top = min(last, top + size)
    return rows, top
