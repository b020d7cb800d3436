"""Whether a load has begun to rise, and how many come one horizon from now if it has. Pure: counts of equal buckets in.

Two ways in which the latest n buckets may differ from those before them, whose mean is m:

    line   m + s, m + 2 s, ... m + n s      it has begun to grow, and grows on
    step   l, l, ... l                      it has another level

Of counts whose spread is known, the likelihood of either over that of no difference is exp(z^2 / 2), z being what is
fitted (s, or l - m) in spreads of its own: a matched filter. The n with the greatest z is when it most likely began
(the generalised likelihood ratio: Lorden, Ann. Math. Stat. 1971). A line whose z is above ALARM is taken for a rise:
the steepest that is nearly as likely is carried on for a horizon, unless a step is by far the better account.

Nothing here knows what a bucket's length is, or what is forecast.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import sqrt
from typing import NamedTuple

HELD = 150
"""Latest buckets that are looked at."""
KNOWN = 12
"""Of them that must lie before a rise."""
LINES = (8, 9, 10, 12, 15, 18, 22, 26, 30)
"""Buckets in which a load may have grown. None is carried on for a horizon that was seen for less: what noise fits to n
buckets is as steep as n^-1.5."""
MOST = LINES[-1]
ALARM = 2.5
"""A line's z above which it is taken for a rise, not for noise."""
LIKELY = 3.84
"""By so much may a line's z^2 be below the best one's: with 95 % it began within those (chi squared, one degree)."""
EASE = 4.0
"""A line's z that noise hardly reaches in a day."""
DECISIVE = 16.0
"""By so much must a step's z^2 be above a line's: it is then e^8 times as likely."""
UPPER, AHEAD = 1.28, 0.5
"""Spreads of a level that nine of ten stay below, and spreads of a line that are added to where it goes."""
MEMORY, PRIOR = 120, 20
"""Buckets over which it is learnt how counts spread, and how many the guess weighs that they do as Poisson's."""
OUTLIER = 9.0
"""Times the variance that one count may add to it at most: a sudden load is no spread."""


class Rise:
    """One stream of counts. `horizon`: how many buckets ahead is asked for."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._counts: deque[float] = deque(maxlen=HELD)
        self._spreads = Spreads()

    def step(self, count: float) -> None:
        self._counts.append(count)
        self._spreads.step(count)

    def ahead(self) -> float | None:
        """The count one horizon from now if the load rises; None if it does not."""
        past = _Past(self._counts, self._spreads.dispersion)
        lines = [past.line(n, self._horizon) for n in LINES if past.knows(n)]
        best = max((line.z for line in lines), default=0.0)
        if best <= ALARM:
            return None
        step = max(past.step(n) for n in range(1, MOST + 1) if past.knows(n))
        if step.z**2 > best**2 + DECISIVE:
            return step.ahead
        likely = max(ALARM, sqrt(best**2 - LIKELY))
        return max(line.ahead for line in lines if line.z >= likely)

    def flat(self) -> tuple[float, float] | None:
        """The latest level, and by how much a count of it spreads; None while little is known."""
        if len(self._counts) < KNOWN:
            return None
        past = _Past(self._counts, self._spreads.dispersion)
        level = past.latest(KNOWN)
        return level, sqrt(past.dispersion * level)

    def by_noise(self) -> float:
        """The count that noise alone may make foreseen on one of these days; 0 while little is known."""
        past, n = _Past(self._counts, self._spreads.dispersion), LINES[0]
        if not past.knows(n):
            return 0.0
        level = past.latest(KNOWN)
        steepest = (EASE + AHEAD) * sqrt(past.dispersion * level / _squares(n))
        return level + steepest * (n + self._horizon)


class Spreads:
    """How counts spread, beside all that moves their mean: half the square of one's difference from the one before.

    `dispersion` is their variance over their mean: 1 of requests that come by themselves, more of those that cluster.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._weight = 1 / PRIOR
        self._dispersions: deque[float] = deque([1.0], maxlen=MOST)

    def step(self, count: float) -> None:
        last, self._last = self._last, count
        if last is None:
            return
        off = (count - last) ** 2 / max(1.0, count + last)
        before = self._dispersions[-1]
        self._weight = max(1 / MEMORY, self._weight / (1 + self._weight))
        self._dispersions.append(before + self._weight * (min(off, OUTLIER * before) - before))

    @property
    def dispersion(self) -> float:
        """As it was before anything that may be a rise; at least 1."""
        return max(1.0, self._dispersions[0])


class _Fit(NamedTuple):
    """The greatest of several is the likeliest."""

    z: float
    ahead: float


class _Past:
    """Sums over the latest counts."""

    def __init__(self, counts: Sequence[float], dispersion: float) -> None:
        self._size = len(counts)
        self.dispersion = dispersion
        self._sums = [0.0, *accumulate(reversed(counts))]
        self._weighted = [*accumulate(self._sums[: MOST + 1])]
        """Of the latest n, the newest n times, the oldest once."""

    def knows(self, n: int) -> bool:
        return self._size >= n + KNOWN

    def spread(self, count: float) -> float:
        """By how much a count spreads that is so many on average."""
        return sqrt(self.dispersion * max(1.0, count))

    def latest(self, n: int) -> float:
        """The mean of the latest n."""
        return self._sums[n] / n

    def line(self, n: int, horizon: int) -> _Fit:
        """Least squares of level and slope: 0 before the latest n, then 1, 2, ... n."""
        ones = n * (n + 1) / 2
        slope, level, z = self._fit(self._weighted[n], ones, _squares(n))
        slope += AHEAD * self.spread(level) / sqrt(_squares(n))
        return _Fit(z, level + slope * (n + horizon))

    def step(self, n: int) -> _Fit:
        """The same of what is 0 before the latest n, then 1."""
        by, level, z = self._fit(self._sums[n], n, n)
        return _Fit(z, level + by + UPPER * self.spread(level + by) / sqrt(n))

    def _fit(self, product: float, ones: float, squares: float) -> tuple[float, float, float]:
        """Of counts on something: its factor, the level where it is 0, and the factor's z.

        `product`: of counts and it, summed; `ones`, `squares`: its sum, and that of its squares.
        """
        total, size = self._sums[-1], self._size
        about_mean = squares - ones**2 / size
        factor = (product - ones * total / size) / about_mean
        level = (total - factor * ones) / size
        return factor, level, factor * sqrt(about_mean) / self.spread(total / size)


def _squares(n: int) -> float:
    """1 + 4 + 9 + ... + n^2."""
    return n * (n + 1) * (2 * n + 1) / 6
