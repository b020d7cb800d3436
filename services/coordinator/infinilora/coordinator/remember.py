"""What the leader knows of the traffic, left in the store for the next one: demand by bucket, and the calendar.

Fenced: what a leader leaves that was deposed is not taken. A new leader takes up what was left before it decides
anything; should it have listened longer itself, that changes nothing.
"""

import logging
from collections.abc import Iterable

import msgspec

from infinilora.coordinator.history import joined
from infinilora.coordinator.prefetch import SLOTS
from infinilora.coordinator.traffic import Watched
from infinilora.protocol import keys
from infinilora.protocol.errors import Internal
from infinilora.protocol.ids import Fingerprint
from infinilora.protocol.traffic import CalendarSpan, DemandHistory
from infinilora.runtime.store import Change, Store, Value, fence

logger = logging.getLogger(__name__)

LEAVE_S = 20.0
"""No more often, however short the buckets: two days of them are a hundred kilobytes."""


class Remembrance:
    """One coordinator's. Raises Unavailable, and goes on from there the next time."""

    def __init__(self, store: Store, watched: Watched) -> None:
        self._store = store
        self._watched = watched
        self._epoch: int | None = None
        self._taken: set[Fingerprint] = set()
        """Bases that this leader has taken up, under `_epoch`."""
        self._left_at: float | None = None
        self._left_span = -1
        """The latest span of the calendar that the store has."""

    async def take_up(self, bases: Iterable[Fingerprint], epoch: int) -> None:
        """Once in each leadership, for each base."""
        if epoch != self._epoch:
            await self._take_up_calendar()
            self._epoch, self._taken, self._left_at = epoch, set(), None
        for base in sorted(set(bases) - self._taken):
            await self._take_up(base)
            self._taken.add(base)

    async def leave(self, epoch: int) -> None:
        """When a bucket is over. Does nothing if another leads."""
        now = self._watched.clock()
        if self._left_at is not None and now - self._left_at < LEAVE_S:
            return
        for base in sorted(self._taken):
            await self._store.swap([fence(epoch), _put(keys.demand(base), self._watched.history(base))])
        for place, span in self._watched.calendar.since(self._left_span):
            if await self._store.swap([fence(epoch), _put(keys.CALENDAR, span, field=str(place))]):
                self._left_span = span.number
        self._left_at = now

    async def _take_up(self, base: Fingerprint) -> None:
        try:
            left = await self._store.get(keys.demand(base), DemandHistory)
        except Internal as error:
            logger.warning("what was left of the demand is not used", extra={"base": base, "error": error.message})
            return
        if left is None:
            return
        own, demand = self._watched.history(base), self._watched.demand(base)
        both = joined(left.value, own, demand.season)
        if len(both.counts) > len(own.counts):
            demand.remember(both.counts, both.in_flight)
            logger.info("demand taken up", extra={"base": base, "buckets": len(both.counts), "own": len(own.counts)})

    async def _take_up_calendar(self) -> None:
        spans = []
        for place in range(SLOTS):
            try:
                span: Value[CalendarSpan] | None = await self._store.get_field(keys.CALENDAR, str(place), CalendarSpan)
            except Internal as error:
                logger.warning("a span of the calendar is not used", extra={"place": place, "error": error.message})
                continue
            if span is not None:
                spans.append(span.value)
        self._watched.calendar.remember(spans, self._watched.wall())
        self._left_span = max((span.number for span in spans), default=-1)


def _put(key: str, value: DemandHistory | CalendarSpan, *, field: str = "") -> Change:
    return Change(key, msgspec.UNSET, value, field)
