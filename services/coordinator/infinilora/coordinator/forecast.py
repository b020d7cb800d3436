"""How many requests will come one lead time from now, from how many came. Pure: counts of equal buckets of time in.

Several small methods run side by side. Each bucket is the test of what each of them said `horizon` buckets before;
the one that was least wrong of late speaks, and its past errors say how far it may be off:

    counts --> method: step, ahead --> wait `horizon` buckets --> error = count - what was said
                                                                  mean |error| chooses
                                                                  a quantile of error / sqrt(said) is the band

Counts of requests that come by themselves spread by the root of their mean: so errors of a busy hour say what to expect
of a quiet one.

Nothing here knows what a bucket's length is.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, sqrt
from typing import Protocol

from infinilora.coordinator.rise import UPPER, Rise

SCORED = 360
"""Latest buckets that methods are compared over."""
ENOUGH = 30
"""Errors that a method must have before it may speak, and any band be drawn: of fewer, the choice was noise."""
COVERED = 0.9
"""Share of past errors that the band's upper end stays above."""
MEAN = 0.8
"""Mean absolute error of what spreads by one."""
DAMPED = 0.95
"""What is left of a trend one bucket later: no line goes on for ever."""


class Method(Protocol):
    """Takes counts one by one; says what comes so many buckets later, or None while it knows too little."""

    def step(self, count: float) -> None: ...
    def ahead(self, horizon: int) -> float | None: ...


class Last:
    """What came last comes again."""

    def __init__(self) -> None:
        self._count: float | None = None

    def step(self, count: float) -> None:
        self._count = count

    def ahead(self, horizon: int) -> float | None:  # noqa: ARG002 - it says the same for all
        return self._count


class Ewma:
    """An average in which each bucket weighs less by `1 - alpha` than the next."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._level: float | None = None

    def step(self, count: float) -> None:
        self._level = count if self._level is None else self._level + self._alpha * (count - self._level)

    def ahead(self, horizon: int) -> float | None:  # noqa: ARG002 - it says the same for all
        return self._level


class Holt:
    """A level, and a trend that goes on, each bucket less (damped)."""

    def __init__(self, alpha: float, beta: float) -> None:
        self._alpha = alpha
        self._beta = beta
        self._level: float | None = None
        self._trend = 0.0

    def step(self, count: float) -> None:
        if self._level is None:
            self._level = count
            return
        before, said = self._level, self._level + DAMPED * self._trend
        self._level = said + self._alpha * (count - said)
        self._trend = self._beta * (self._level - before) + (1 - self._beta) * DAMPED * self._trend

    def ahead(self, horizon: int) -> float | None:
        return None if self._level is None else self._level + _sum_of_damped(horizon) * self._trend


class HoltWinters:
    """A level, and what each bucket of a season adds to it; begins when it has seen a whole season.

    Trend within a season is the season's own; from one to the next the level follows.
    """

    def __init__(self, alpha: float, gamma: float, season: int) -> None:
        self._alpha = alpha
        self._gamma = gamma
        self._season = season
        self._first: list[float] = []
        self._level = 0.0
        self._parts: list[float] = []
        self._at = 0
        """Where in the season the next bucket lies."""

    def step(self, count: float) -> None:
        if not self._parts:
            self._begin(count)
            return
        part, before = self._parts[self._at], self._level
        self._level = before + self._alpha * (count - part - before)
        self._parts[self._at] = part + self._gamma * (count - self._level - part)
        self._at = (self._at + 1) % self._season

    def ahead(self, horizon: int) -> float | None:
        if not self._parts:
            return None
        return self._level + self._parts[(self._at + horizon - 1) % self._season]

    def _begin(self, count: float) -> None:
        self._first.append(count)
        if len(self._first) == self._season:
            self._level = sum(self._first) / self._season
            self._parts = [one - self._level for one in smooth(self._first, max(1, self._season // 48))]
            self._first.clear()


def smooth(counts: Sequence[float], reach: int) -> list[float]:
    """Each count's mean with `reach` neighbours on both sides; the ends are neighbours, as a season's are."""
    size, width = len(counts), min(2 * reach + 1, len(counts))
    total = sum(counts[(index - width // 2) % size] for index in range(width))
    means = []
    for index in range(size):
        means.append(total / width)
        total += counts[(index + width - width // 2) % size] - counts[(index - width // 2) % size]
    return means


METHODS: dict[str, Callable[[int], Method]] = {
    "last": lambda _: Last(),
    "ewma 0.5": lambda _: Ewma(0.5),
    "ewma 0.2": lambda _: Ewma(0.2),
    "ewma 0.05": lambda _: Ewma(0.05),
    "holt": lambda _: Holt(0.3, 0.1),
    "holt slow": lambda _: Holt(0.1, 0.05),
    "holt-winters": lambda season: HoltWinters(0.1, 0.2, season),
}
"""By name, the simplest first; each is made for a season of so many buckets."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected in a bucket one horizon from now; `upper` is what it stays below nine times of ten.

    `error` is the method's mean absolute error of late; None, with `upper` the same as `count`, while nobody knows.
    `rises`: the load has left its level, and `upper` is where it goes, or more. `by_noise`: what `upper` may become on
    one of these days though nothing has changed.
    """

    method: str
    count: float
    upper: float
    error: float | None
    rises: bool = False
    by_noise: float = 0.0


class _Tried:
    """A method, what it said of buckets that are still to come, and its latest errors."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.errors: deque[float] = deque(maxlen=SCORED)
        self.spreads: deque[float] = deque(maxlen=SCORED)
        """The same errors, each over the spread of such a count."""
        self._said: deque[float | None] = deque()

    def step(self, count: float, horizon: int) -> None:
        if len(self._said) == horizon:
            said = self._said.popleft()
            if said is not None:
                self.errors.append(count - said)
                self.spreads.append((count - said) / spread(said))
        self.method.step(count)
        self._said.append(clip(self.method.ahead(horizon)))

    def error(self, latest: int) -> float:
        return sum(abs(error) for error in islice(reversed(self.errors), latest)) / latest


class Forecaster:
    """One stream of counts and all methods. `season`: buckets of a day."""

    def __init__(self, *, horizon: int, season: int, methods: Sequence[str] = tuple(METHODS)) -> None:
        self._horizon = horizon
        self._rise = Rise(horizon)
        self._tried = {name: _Tried(METHODS[name](season)) for name in methods}

    def step(self, count: float) -> None:
        """The next bucket is over, and so many came in it."""
        self._rise.step(count)
        for tried in self._tried.values():
            tried.step(count, self._horizon)

    def ahead(self) -> Forecast:
        """What the method says that was least wrong; before any could be tested, that all stays as it is."""
        rise, by_noise = self._rise.ahead(), self._rise.by_noise()
        fit = {name: tried for name, tried in self._tried.items() if len(tried.errors) >= ENOUGH}
        if not fit:
            return self._untested(rise, by_noise)
        # All over the same buckets: an error of a quiet hour does not compare with one of a busy hour.
        latest = min(len(tried.errors) for tried in fit.values())
        name = min(fit, key=lambda name: fit[name].error(latest))
        count = clip(fit[name].method.ahead(self._horizon)) or 0.0
        upper = max(count, count + band(fit[name].spreads) * spread(count), rise or 0.0)
        return Forecast(name, count, upper, fit[name].error(latest), rise is not None, by_noise)

    def _untested(self, rise: float | None, by_noise: float) -> Forecast:
        flat = self._rise.flat()
        if flat is None:
            name, tried = next(iter(self._tried.items()))
            count = clip(tried.method.ahead(self._horizon)) or 0.0
            return Forecast(name, count, count, None)
        level, off = flat
        return Forecast("level", level, max(level + UPPER * off, rise or 0.0), MEAN * off, rise is not None, by_noise)


def clip(count: float | None) -> float | None:
    """Nobody sends fewer than no requests."""
    return None if count is None else max(0.0, count)


def spread(count: float) -> float:
    """By how much a count spreads that is so many on average; of none, as of one."""
    return sqrt(max(1.0, count))


def band(errors: Sequence[float]) -> float:
    """What COVERED of the errors, or a little more of them, are not above."""
    return sorted(errors)[ceil(COVERED * len(errors)) - 1]


def _sum_of_damped(horizon: int) -> float:
    """DAMPED + DAMPED^2 + ... so many times."""
    return float(DAMPED * (1 - DAMPED**horizon) / (1 - DAMPED))
