"""Virtual time: what happens when. Knows nothing of what happens."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Timeline:
    """Events in order of time, then of having been planned: the same plan always runs the same way."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        """Plan an event; one of the past happens next."""
        heappush(self._events, (max(when_s, self.now), next(self._numbers), event))

    def run(self, until: Callable[[], bool]) -> None:
        """Until nothing is planned, or `until` says so: it is asked after each event."""
        while self._events:
            self.now, _, event = heappop(self._events)
            self.num_events += 1
            event()
            if until():
                return
