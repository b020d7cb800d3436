"""Which adapters to stage before anybody asks for them. Pure.

Placement has what has heat staged. Here are those that have none, and came at this time one season (a day) before: what
runs by the clock comes again. Nobody who is asked for as often leaves for them: they take bytes that are free, or that
hold what is colder (hints.over); and only so many are under way at once as a link brings within `WITHIN_S`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Literal, NamedTuple

from infinilora.coordinator.hints import Hint, Pair, over
from infinilora.coordinator.placement import Table
from infinilora.protocol.ids import Digest
from infinilora.protocol.traffic import CalendarSpan

WITHIN_S = 2.0
SPARE = 0.1
"""Share of a group's bytes that prefetch leaves free: for what is asked for meanwhile."""
SLOTS = 96
"""Spans of a season, each with what came in it: a quarter of an hour of a day."""
NOTED = 256
"""Adapters of one span, the busiest."""


class Calendar:
    """What came in each span of the latest season; the present span is noted apart until it is over."""

    def __init__(self, season_s: float) -> None:
        self._slot_s = season_s / SLOTS
        self._spans: dict[int, CalendarSpan] = {}
        """By their place in the season, those that are over."""
        self._present: dict[Digest, int] = {}
        self._number: int | None = None

    def note(self, counts: Mapping[Digest, int], now: float) -> None:
        """So many requests have come for these, at `now` on a clock that goes on over seasons."""
        number = self._number_at(now)
        if self._number is not None and number != self._number:
            self._close(number)
        self._number = number
        for digest, count in counts.items():
            self._present[digest] = self._present.get(digest, 0) + count

    def expected(self, now: float, ahead_s: float) -> dict[Digest, float]:
        """Requests a second of what came one season before, in the span of `ahead_s` from now."""
        span = self._spans.get(self._number_at(now + ahead_s) % SLOTS)
        return {digest: count / self._slot_s for digest, count in span.counts.items()} if span else {}

    def remember(self, spans: Iterable[CalendarSpan], now: float) -> None:
        """Take in what somebody else has noted: of the latest season, where nothing newer is known here."""
        latest = self._number_at(now)
        for span in spans:
            known = self._spans.get(span.number % SLOTS)
            if latest - SLOTS <= span.number < latest and (known is None or known.number < span.number):
                self._spans[span.number % SLOTS] = span

    def since(self, number: int) -> list[tuple[int, CalendarSpan]]:
        """The spans after this one that are over, in their order, each with its place."""
        return sorted(
            ((place, span) for place, span in self._spans.items() if span.number > number),
            key=lambda pair: pair[1].number,
        )

    def _number_at(self, now: float) -> int:
        return int(now / self._slot_s)

    def _close(self, number: int) -> None:
        """The span is over; in those that were passed over meanwhile, nothing came."""
        assert self._number is not None  # noqa: S101 - there was one to close
        busiest = sorted(self._present.items(), key=lambda pair: (-pair[1], pair[0]))[:NOTED]
        self._spans[self._number % SLOTS] = CalendarSpan(number=self._number, counts=dict(busiest))
        for passed in range(self._number + 1, min(number, self._number + SLOTS)):
            self._spans[passed % SLOTS] = CalendarSpan(number=passed)
        self._present = {}


class Room(NamedTuple):
    """Of one group: bytes of its pool that nothing holds, and all of them."""

    bytes_free: int
    bytes_total: int


def prefetch(
    expected: Mapping[Digest, float],
    table: Table,
    resident: Mapping[str, Set[Digest]],
    rooms: Mapping[str, Room],
    sizes: Mapping[Digest, int],
    under_way: Iterable[Pair],
    bytes_per_s: float,
    rates: Mapping[Digest, float],
) -> list[Hint]:
    """Busiest first, each to the first group that it is planned on, if it is nowhere, as room and bandwidth allow.

    `under_way` are the stagings that groups were asked for already: they take of the same bandwidth and room. `rates`:
    by which it is said what is colder.
    """
    room = {group: one.bytes_free - SPARE * one.bytes_total for group, one in rooms.items()}
    left = dict.fromkeys(rooms, bytes_per_s * WITHIN_S)
    asked = set(under_way)
    for group, digest in asked:
        if group in rooms:
            room[group] -= sizes.get(digest, 0)
            left[group] -= sizes.get(digest, 0)
    anywhere = {digest for held in resident.values() for digest in held} | {digest for _, digest in asked}
    hints, homes = [], _homes(table)
    for digest in sorted(expected, key=lambda digest: (-expected[digest], digest)):
        size, home = sizes.get(digest), homes.get(digest)
        if size is None or home is None or home not in rooms or digest in anywhere or size > left[home]:
            continue
        colder = sum(sizes.get(one, 0) for one in over(home, digest, table, resident, rates))
        if size > room[home] + colder:
            continue
        room[home] -= size
        left[home] -= size
        hints.append(Hint("stage", home, digest))
    return hints


def _homes(table: Table) -> dict[Digest, str]:
    """The first group of each."""
    return {digest: group for group, digests in sorted(table.items(), reverse=True) for digest in digests}


Outcome = Literal["used", "late", "unused"]


class Prefetched:
    """What has become of each adapter that was staged before anybody asked for it.

    used    somebody asked for it when it was there: without prefetch, that request would have waited for it
    late    somebody asked for it while it was on its way
    unused  it has left, or its group has, and nobody had asked
    """

    def __init__(self) -> None:
        self._open: dict[Pair, bool] = {}
        """Whether it has been there."""

    @property
    def num_there(self) -> int:
        """Those that were there at the last look, and wait for somebody to ask."""
        return sum(self._open.values())

    def begun(self, pairs: Set[Pair]) -> None:
        self._open |= dict.fromkeys(pairs - self._open.keys(), False)

    def look(
        self, resident: Mapping[str, Set[Digest]], asked_for: Set[Digest], under_way: Set[Pair]
    ) -> Counter[Outcome]:
        """What is known now that was not at the look before."""
        seen, still = Counter[Outcome](), dict[Pair, bool]()
        for pair, was_there in self._open.items():
            group, digest = pair
            is_there = digest in resident.get(group, ())
            if digest in asked_for:
                seen["used" if was_there else "late"] += 1
            elif is_there or pair in under_way:
                still[pair] = is_there
            elif was_there:
                seen["unused"] += 1
        self._open = still
        return seen
