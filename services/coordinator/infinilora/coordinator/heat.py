"""What heat says about adapters. Pure: decayed requests per second in, decisions out.

A decayed rate of one half-life forgets half of what it knew in that time: a short one follows, a long one remembers.
Where adapters are is for long, so it goes by the longest; what has just become hot shows in the shortest.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf, log, log2

from infinilora.protocol.ids import Digest

COOLING = 0.5
"""An adapter keeps a copy until its heat has fallen to this share of what called for it: no flapping."""
RISING = 2.0
"""A short half-life's rate over the longest one's, from which an adapter rises."""
ENOUGH = 4.0
"""Requests, decayed, that a rate must rest on before it says anything: one alone looks like a rise."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Where an adapter's heat goes: its latest rate, and how many doublings that lies over the longest view."""

    digest: Digest
    rps: float
    doublings: float
    is_rising: bool


@dataclass(frozen=True, slots=True)
class TopDrift:
    """How the hottest of late differ from those of the long run. Each list is hottest first."""

    came: tuple[Digest, ...]
    went: tuple[Digest, ...]
    moved: dict[Digest, int]
    """Places that one of both has gained (or, below 0, lost); without those that kept theirs."""
    overlap: float
    """Share of all that are in one of the two that are in both; 1 where both are empty."""


@dataclass(frozen=True, slots=True)
class Heat:
    """The hottest adapters as several half-lives see them: `views`, half-life in seconds -> rates, hottest first."""

    views: Mapping[int, Mapping[Digest, float]] = field(default_factory=dict)

    @property
    def latest(self) -> Mapping[Digest, float]:
        """What happens now."""
        return self.views[min(self.views)] if self.views else {}

    @property
    def recent(self) -> Mapping[Digest, float]:
        """Between the two (of an even number, the longer): enough seen to count with, and not much of long ago."""
        return self.views[sorted(self.views)[len(self.views) // 2]] if self.views else {}

    @property
    def lasting(self) -> Mapping[Digest, float]:
        """What can be planned with."""
        return self.views[max(self.views)] if self.views else {}

    def asked_for(self) -> Set[Digest]:
        """All that have any heat."""
        return frozenset().union(*self.views.values())

    def rates(self, digest: Digest) -> dict[float, float]:
        return {half_life_s: rates.get(digest, 0.0) for half_life_s, rates in self.views.items()}

    def rising(self) -> dict[Digest, float]:
        """The adapters whose latest rate is far above that of the long run, and that rate."""
        fit = {digest for half_life_s, rates in self.views.items() for digest in _resting_on_enough(rates, half_life_s)}
        drifts = (drift(digest, self.rates(digest)) for digest in fit)
        return {one.digest: one.rps for one in drifts if one.is_rising}

    def to_plan_with(self) -> dict[Digest, float]:
        """For each adapter the rate that it is placed by: of the long run, or its latest if it rises."""
        # Views hold the hottest only: what the longest leaves out is not above the last that it has.
        least = min(self.lasting.values(), default=0.0)
        return {**dict.fromkeys(self.asked_for(), least), **self.lasting, **self.rising()}


def copies(rps: float, hot_rps: float, had: int) -> int:
    """On how many groups an adapter should be: one more for each `hot_rps`; those it had go later than they came."""
    wanted = 1 + int(rps / hot_rps)
    kept = 1 + int(rps / (hot_rps * COOLING))
    return max(wanted, min(had, kept))


def hot_spots(heat: Mapping[Digest, float], hot_rps: float, had: Mapping[Digest, int]) -> dict[Digest, int]:
    """The adapters that deserve more than one group, and how many, given how many they had."""
    wanted = {digest: copies(rps, hot_rps, had.get(digest, 0)) for digest, rps in heat.items()}
    return {digest: count for digest, count in wanted.items() if count > 1}


def top_drift(latest: Mapping[Digest, float], lasting: Mapping[Digest, float], count: int) -> TopDrift:
    """What became of the `count` hottest; both arguments are hottest first."""
    now, before = list(islice(latest, count)), list(islice(lasting, count))
    places = {digest: place for place, digest in enumerate(before)}
    gained = {digest: places[digest] - place for place, digest in enumerate(now) if digest in places}
    either = len(set(now) | set(before))
    return TopDrift(
        came=tuple(digest for digest in now if digest not in places),
        went=tuple(digest for digest in before if digest not in gained),
        moved={digest: count for digest, count in gained.items() if count},
        overlap=len(gained) / either if either else 1.0,
    )


def drift(digest: Digest, rates: Mapping[float, float]) -> Drift:
    """One adapter's drift from its rates by half-life in seconds; of one half-life, or of no heat, there is none.

    It rises if its shortest view that rests on enough requests sees at least RISING times what the longest sees.
    """
    if not rates:
        return Drift(digest, 0.0, 0.0, is_rising=False)
    longest = rates[max(rates)]
    latest = next((rates[h] for h in sorted(rates) if requests(rates[h], h) >= ENOUGH), longest)
    if latest <= 0:
        return Drift(digest, 0.0, 0.0, is_rising=False)
    doublings = log2(latest / longest) if longest > 0 else inf
    return Drift(digest, latest, doublings, is_rising=doublings >= log2(RISING))


def _resting_on_enough(rates: Mapping[Digest, float], half_life_s: float) -> Iterator[Digest]:
    """Of rates that are hottest first."""
    return takewhile(lambda digest: requests(rates[digest], half_life_s) >= ENOUGH, rates)


def requests(rps: float, half_life_s: float) -> float:
    """How many requests, counted by what is left of each, a decayed rate rests on."""
    return rps * half_life_s / log(2)
