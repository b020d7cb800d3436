"""How long an `add` may wait: a multiple of what that site has taken lately. Pure; no clock."""

from collections import deque

DEADLINE_FACTOR = 20.0
MIN_DEADLINE_S = 0.25
MAX_DEADLINE_S = 1.0
WINDOW = 256
_REFRESH = 32


def site_deadline_s(p99_s: float | None) -> float:
    """20 x p99, between 250 ms and 1 s; the most while nothing is known."""
    if p99_s is None:
        return MAX_DEADLINE_S
    return min(max(DEADLINE_FACTOR * p99_s, MIN_DEADLINE_S), MAX_DEADLINE_S)


class RunningP99:
    """The 99th percentile of the last 256 values, brought up to date after 32 or more; None before that."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._since_refresh = 0
        self.value: float | None = None

    def add(self, *values: float) -> None:
        self._values.extend(values)
        self._since_refresh += len(values)
        if self._since_refresh >= _REFRESH:
            self._since_refresh = 0
            self.value = sorted(self._values)[(len(self._values) * 99 - 1) // 100]


class SiteClock:
    """What a site's calls took, and how long one may take. Brought up to date once a step, not at every call."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        """Of the calls since `catch_up`; whoever waits for one appends to it."""
        self.deadline_s = site_deadline_s(None)
        self._p99 = RunningP99()

    def catch_up(self) -> None:
        if self.took_s:
            self._p99.add(*self.took_s)
            self.took_s.clear()
            self.deadline_s = site_deadline_s(self._p99.value)
