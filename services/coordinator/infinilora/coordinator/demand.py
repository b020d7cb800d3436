"""What is asked of a base: requests by bucket of time, from gateways' counts; sequences at once, by Little's law. Pure.

Counts are those since a gateway's start, so each life of a gateway is a meter that is read from time to time.
"""

from collections import deque
from collections.abc import Sequence

from infinilora.coordinator.forecast import Forecast, Forecaster
from infinilora.coordinator.history import AVERAGED, kept
from infinilora.protocol.ids import Fingerprint
from infinilora.protocol.traffic import Traffic

REMEMBERED = 10_000
"""Lives of gateways whose meters are kept; the one that was read longest ago goes first. Of a fleet of more gateways
than this nothing would ever be counted: each would be forgotten before it is read again."""
WEIGHT = 0.1
"""Of the latest bucket in the averages that Little's law is applied to."""
IDLE = 1e-9


class Meters:
    """How much each life of each gateway had counted when it was read last."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], dict[Fingerprint, int]] = {}

    def read(self, report: Traffic) -> dict[Fingerprint, int]:
        """Requests that have come since this life was read last, by base.

        Of a life that is new here nothing is new: when its requests came, nobody knows.
        """
        life = report.gateway, report.incarnation
        before = self._read.pop(life, None)
        self._read[life] = report.arrivals
        while len(self._read) > REMEMBERED:
            del self._read[next(iter(self._read))]
        if before is None:
            return {}
        new = {base: total - before.get(base, 0) for base, total in report.arrivals.items()}
        return {base: count for base, count in new.items() if count > 0}


class Demand:
    """One base's. `step` closes a bucket."""

    def __init__(self, *, bucket_s: float, horizon: int, season: int) -> None:
        self.bucket_s = bucket_s
        self.season = season
        self._horizon = horizon
        self._count = 0
        self._samples: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self._forecaster = Forecaster(horizon=self._horizon, season=self.season)
        self._ahead: Forecast | None = None
        """Of the buckets so far, once it was asked for."""
        self._rate = 0.0
        self._in_flight = 0.0
        self._weight = 0.0
        self.counts: deque[int] = deque(maxlen=kept(self.season))
        """Of the buckets that are over; `in_flight` of the latest of them."""
        self.in_flight: deque[float] = deque(maxlen=AVERAGED)
        self.idle_s = 0.0
        """For how long nobody has come, nothing has run and somebody could; 0 in the bucket in which somebody comes."""

    def remember(self, counts: Sequence[int], in_flight: Sequence[float]) -> None:
        """As if these buckets had been all so far (`in_flight` of the latest); the present one goes on."""
        present, self._samples = (self._count, self._samples), []
        self._begin()
        unknown = [0.0] * (len(counts) - len(in_flight))
        for count, sequences in zip(counts, [*unknown, *in_flight], strict=True):
            self._count = count
            self.sample(sequences)
            self.step()
        self._count, self._samples = present
        if self._count:
            self.idle_s = 0.0

    def arrived(self, count: int) -> None:
        self._count += count
        self.idle_s = 0.0

    def awaited(self) -> None:
        """The first engine is still to come. Whoever came for it waits, or was told to come again."""
        self.idle_s = 0.0

    def sample(self, in_flight: float) -> None:
        """So many sequences are with the engines now, running and waiting."""
        self._samples.append(in_flight)

    def step(self) -> None:
        """The bucket is over."""
        count, self._count = self._count, 0
        in_flight = sum(self._samples) / len(self._samples) if self._samples else 0.0
        is_idle = not count and not any(self._samples)
        self.idle_s = self.idle_s + self.bucket_s if is_idle else 0.0
        self._samples.clear()
        self.counts.append(count)
        self.in_flight.append(round(in_flight, 2))
        # Means of what has been seen, not of what was before the first: early ones weigh what they should.
        self._weight = self._weight * (1 - WEIGHT) + WEIGHT
        self._rate += (count / self.bucket_s - self._rate) * WEIGHT / self._weight
        self._in_flight += (in_flight - self._in_flight) * WEIGHT / self._weight
        self._forecaster.step(float(count))
        self._ahead = None

    @property
    def residence_s(self) -> float:
        """How long a request stays, by Little's law; 0 while none has come.

        Where fewer than one has come in the time that the means are of, one is reckoned with: what stays on while
        nobody comes would else seem to stay for ever, and a single request ahead to need all that there is.
        """
        return self._in_flight / max(self._rate, WEIGHT / self.bucket_s) if self._rate > IDLE else 0.0

    @property
    def rate(self) -> float:
        """Requests a second of late."""
        return self._rate

    def ahead(self) -> Forecast:
        """Of a bucket one horizon from now."""
        if self._ahead is None:
            self._ahead = self._forecaster.ahead()
        return self._ahead

    def in_flight_ahead(self) -> float:
        """Sequences at once that are to be reckoned with then. Never fewer than there are on average now."""
        ahead = self.ahead()
        if ahead.error is None:  # what is said is a guess
            return self._in_flight
        return max(ahead.upper / self.bucket_s * self.residence_s, self._in_flight)

    def in_flight_by_noise(self) -> float:
        """Sequences at once that may come to be reckoned with though nothing changes: who has fewer will want more."""
        return self.ahead().by_noise / self.bucket_s * self.residence_s

    def growth(self) -> float:
        """The rate to reckon with then over that of now, at least 1; 1 while nobody comes."""
        return max(1.0, self.ahead().upper / self.bucket_s / self._rate) if self._rate > IDLE else 1.0
