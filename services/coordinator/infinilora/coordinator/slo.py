"""Whether what was promised is kept: attainment over sliding windows, the budget that is left, alerts. Pure.

attainment    share of the requests that were within the objective
budget        1 - target: the share that may miss it
burn rate     share that missed it / budget; above 1 the budget will not last

An alert begins when the long and the short window both burn fast, and ends when the short one keeps the budget:
one bad second is no reason to ring, and what is over is not rung for any longer.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from infinilora.protocol.ids import Digest, Fingerprint, SloClass
from infinilora.protocol.traffic import Tally, Times, merged

Metric = Literal["ttft", "tpot"]
FAST = 2.0
"""Burn rate from which an alert begins."""
MIN_REQUESTS = 20
"""Requests of the short window below which nobody rings: one of three is no third."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Of each class: seconds that `target` of the requests are to be within. `batch` has none."""

    ttft_s: dict[SloClass, float]
    tpot_s: float
    target: float

    def seconds(self, slo_class: SloClass, metric: Metric) -> float | None:
        if slo_class not in self.ttft_s:
            return None
        return self.ttft_s[slo_class] if metric == "ttft" else self.tpot_s


class Subject(NamedTuple):
    """Whose times: all of a class (digest None), or one adapter's."""

    base: Fingerprint
    slo_class: SloClass
    digest: Digest | None
    metric: Metric


class Attainment(NamedTuple):
    """Of so many requests, the share within the objective, and how fast the budget burns."""

    requests: int
    share: float
    burn_rate: float


def attainment(tally: Tally, metric: Metric, seconds: float, target: float) -> Attainment:
    """Of no requests all have kept it. Whoever left sooner than they were promised anything says nothing of it."""
    times = tally.ttft if metric == "ttft" else tally.tpot
    given_up = tally.left.count - tally.left.within(seconds) if metric == "ttft" else 0
    count = times.count + given_up
    share = times.within(seconds) / count if count else 1.0
    return Attainment(count, share, (1 - share) / (1 - target))


class Window:
    """Times of the latest `parts` equal spans, `long`, and of the latest `short_parts` of them, `short`.

    The present span is not over. Both sums are kept up as spans come and go: a report costs by what it says, whatever
    has been said before.
    """

    def __init__(self, parts: int, short_parts: int) -> None:
        self._num_parts = parts
        self._num_short_parts = short_parts
        self._parts: deque[Times] = deque([{}])
        self.long: Times = {}
        self.short: Times = {}

    def add(self, tallies: Sequence[Tally]) -> None:
        for times in (self._parts[-1], self.long, self.short):
            merged(tallies, times)

    def turn(self) -> None:
        """The present span is over; the oldest is forgotten."""
        self._parts.append({})
        if len(self._parts) > self._num_short_parts:
            _take_out(self.short, self._parts[-1 - self._num_short_parts])
        if len(self._parts) > self._num_parts:
            _take_out(self.long, self._parts.popleft())


def _take_out(times: Times, gone: Times) -> None:
    for key, tally in gone.items():
        if key not in times:  # nothing was ever counted in it
            continue
        times[key].unmerge(tally)
        if times[key].is_empty:
            del times[key]


class Judged(NamedTuple):
    """One subject in both windows."""

    subject: Subject
    long: Attainment
    short: Attainment


def judge(window: Window, objective: Objective) -> Iterator[Judged]:
    """Every subject that has an objective, by the whole window and by its latest parts."""
    for key, tally in window.long.items():
        for metric in get_args(Metric):
            seconds = objective.seconds(tally.slo_class, metric)
            if seconds is None:
                continue
            latest = window.short[key] if key in window.short else Tally(*key)
            both = (attainment(t, metric, seconds, objective.target) for t in (tally, latest))
            yield Judged(Subject(*key, metric), *both)


class Alarms:
    """Which alerts are on."""

    def __init__(self) -> None:
        self.firing: dict[Subject, Judged] = {}

    def misses_first_tokens(self, base: Fingerprint) -> bool:
        """Whether a class of this base does: more engines might help."""
        return any(s.base == base and s.digest is None and s.metric == "ttft" for s in self.firing)

    def look(self, judged: Iterable[Judged]) -> list[tuple[Judged, bool]]:
        """What has begun (True) or ended (False) since the look before. What is not judged any more has ended."""
        seen, changes = {one.subject: one for one in judged}, []
        for subject, one in seen.items():
            is_bad = min(one.long.burn_rate, one.short.burn_rate) >= FAST and one.short.requests >= MIN_REQUESTS
            if is_bad and subject not in self.firing:
                changes.append((one, True))
        for subject, before in self.firing.items():
            now = seen.get(subject)
            if now is None or now.short.burn_rate <= 1.0:
                changes.append((now or before, False))
        for one, begins in changes:
            if begins:
                self.firing[one.subject] = one
            else:
                del self.firing[one.subject]
        return changes
