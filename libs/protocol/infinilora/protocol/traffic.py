"""What gateways say of the requests they have seen, and what the leader advises them: JSON of the bus. Pure.

A `Sketch` holds how many values fell into each logarithmic bucket: quantiles and shares are right to ACCURACY of the
value, and two sketches are merged by adding them up, exactly as if one had seen all.
"""

from collections.abc import Iterable
from math import ceil, log

import msgspec

from infinilora.protocol.ids import Digest, Fingerprint, SloClass

ACCURACY = 0.01
_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GAMMA = log(_GAMMA)
LEAST_S, MOST_S = 1e-4, 1e4
"""Shorter and longer times are counted as these: at most 922 buckets."""


class Sketch(msgspec.Struct):
    """Times in seconds: bucket b counts those in (GAMMA^(b-1), GAMMA^b]."""

    buckets: dict[int, int] = {}

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    def add(self, seconds: float) -> None:
        bucket = ceil(log(min(max(seconds, LEAST_S), MOST_S)) / _LOG_GAMMA)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: "Sketch") -> None:
        """Take in what another has seen."""
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def unmerge(self, other: "Sketch") -> None:
        """Take out what was taken in of another before."""
        for bucket, count in other.buckets.items():
            left = self.buckets.pop(bucket, 0) - count
            if left > 0:
                self.buckets[bucket] = left

    def quantile(self, share: float) -> float | None:
        """What this share of the times is not above, to ACCURACY; None of no times."""
        wanted, seen = share * (self.count - 1), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen > wanted:
                return float(2 * _GAMMA**bucket / (_GAMMA + 1))
        return None

    def within(self, seconds: float) -> int:
        """How many of the times were not above this; those within ACCURACY of it may be counted either way."""
        last = log(min(max(seconds, LEAST_S), MOST_S)) / _LOG_GAMMA
        return sum(count for bucket, count in self.buckets.items() if bucket - 0.5 <= last)


class Tally(msgspec.Struct):
    """Times of requests of one class that ended in one interval: of one adapter, or (None) of all and of the base."""

    base: Fingerprint
    slo_class: SloClass
    digest: Digest | None = None
    ttft: Sketch = msgspec.field(default_factory=Sketch)
    tpot: Sketch = msgspec.field(default_factory=Sketch)
    left: Sketch = msgspec.field(default_factory=Sketch)
    """How long those had waited whose clients left before the first token."""

    @property
    def is_empty(self) -> bool:
        return not (self.ttft.buckets or self.tpot.buckets or self.left.buckets)

    def merge(self, other: "Tally") -> None:
        self.ttft.merge(other.ttft)
        self.tpot.merge(other.tpot)
        self.left.merge(other.left)

    def unmerge(self, other: "Tally") -> None:
        self.ttft.unmerge(other.ttft)
        self.tpot.unmerge(other.tpot)
        self.left.unmerge(other.left)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway's report. Counts are since its start: a report that is lost loses none of them."""

    gateway: str
    incarnation: str
    arrivals: dict[Fingerprint, int] = {}
    by_adapter: dict[Digest, int] = {}
    """Of the busiest adapters, those since the report before."""
    tallies: tuple[Tally, ...] = ()
    """Of what ended since the report before."""


class DemandHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What is forecast from, of one base: requests by bucket of time, the oldest first. Kept for the next leader."""

    bucket_s: float
    ended_at: float
    """When the last bucket was over, in seconds since 1970."""
    counts: tuple[int, ...] = ()
    in_flight: tuple[float, ...] = ()
    """Sequences at once, of the latest buckets only."""


class CalendarSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Who came in one span of a season. `number` counts spans since 1970."""

    number: int
    counts: dict[Digest, int] = {}


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader asks of gateways. Each is good for ADVICE_S: one that is not renewed ends."""

    epoch: int
    hurried: tuple[Digest, ...] = ()
    """Adapters whose requests are to go before others: they have missed their SLO."""
    shed: tuple[Fingerprint, ...] = ()
    """Bases with no engine to spare: `batch` requests are to come later."""


ADVICE_S = 5.0


class SloAlert(msgspec.Struct, frozen=True, kw_only=True):
    """The SLO of a class, or of one of its adapters, is being missed, or is kept again."""

    base: Fingerprint
    slo_class: SloClass
    digest: Digest | None
    metric: str
    is_firing: bool
    attainment: float
    burn_rate: float
    epoch: int


Times = dict[tuple[Fingerprint, SloClass, Digest | None], Tally]
"""Tallies by what they are of."""


def merged(tallies: Iterable[Tally], into: Times | None = None) -> Times:
    """By what they are of; those of the same are added up, and to those of `into`. `tallies` stay as they are."""
    found: Times = {} if into is None else into
    for tally in tallies:
        key = tally.base, tally.slo_class, tally.digest
        found.setdefault(key, Tally(*key)).merge(tally)
    return found
