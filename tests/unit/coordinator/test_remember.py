"""What a leader leaves of the traffic, and the next takes up, over memory twins."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from infinilora.coordinator.remember import LEAVE_S, Remembrance
from infinilora.coordinator.traffic import Watched
from infinilora.protocol import keys
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.protocol.traffic import CalendarSpan, DemandHistory, Traffic
from infinilora.runtime.members import Members
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.store import Change

BASE, OTHER = (Fingerprint(digest_of(name)) for name in (b"base", b"other"))
A, B = digest_of(b"a"), digest_of(b"b")
LEAD_S, SEASON_S = 60.0, 9600.0
BUCKET_S, SPAN_S = 10.0, 100.0


class Coordinators:
    """Several that share a store, and one clock."""

    def __init__(self, store: MemoryStore, bus: MemoryBus, members: Members) -> None:
        self.store, self.now = store, 0.0
        self._bus, self._members = bus, members
        self._arrived = 0

    def new(self) -> tuple[Watched, Remembrance]:
        watched = Watched(
            self._bus,
            self._members,
            lead_s=LEAD_S,
            season_s=SEASON_S,
            clock=lambda: self.now,
            wall=lambda: 1e6 + self.now,
        )
        watched.hear(Traffic(gateway="g", incarnation="x", arrivals={BASE: self._arrived}))
        return watched, Remembrance(self.store, watched)

    async def lead(self) -> int:
        """Have another lead: its epoch."""
        epoch = await self.store.counter(keys.EPOCH)
        await self.store.release_lease(keys.LEADER, "somebody", epoch)
        await self.store.acquire_lease(keys.LEADER, "somebody", 60)
        return epoch + 1

    def bucket(self, count: int, *watchers: Watched) -> None:
        """So many come in the next bucket, all of them for A, and these coordinators hear of it."""
        self._arrived += count
        report = Traffic(gateway="g", incarnation="x", arrivals={BASE: self._arrived}, by_adapter={A: count})
        for watched in watchers:
            watched.hear(report)
        self.now += BUCKET_S
        for watched in watchers:
            assert watched.tick()


@pytest.fixture
async def coordinators() -> AsyncIterator[Coordinators]:
    bus = MemoryBus()
    async with Members(bus, interval_s=60) as members:
        yield Coordinators(MemoryStore(), bus, members)


def counts(watched: Watched) -> list[int]:
    return list(watched.demand(BASE).counts)


async def test_a_new_leader_knows_what_came_before_it_was_there(coordinators: Coordinators) -> None:
    first, left = coordinators.new()
    epoch = await coordinators.lead()
    await left.take_up({BASE}, epoch)
    for count in (3, 5, 8, 4):
        coordinators.bucket(count, first)
        await left.leave(epoch)
    second, right = coordinators.new()
    await right.take_up({BASE, OTHER}, await coordinators.lead())
    # The last was left at most LEAVE_S ago; what came since, nobody heard.
    assert counts(second) == [3, 5, 8, 8]
    coordinators.bucket(7, second)
    assert counts(second) == [3, 5, 8, 8, 7]


async def test_one_that_listened_meanwhile_goes_on_with_its_own(coordinators: Coordinators) -> None:
    (first, left), (second, right) = coordinators.new(), coordinators.new()
    epoch = await coordinators.lead()
    await left.take_up({BASE}, epoch)
    for count in (3, 5, 8):
        coordinators.bucket(count, first, second)
        await left.leave(epoch)
    before = second.demand(BASE)
    forecast = before.ahead()
    await right.take_up({BASE}, await coordinators.lead())
    assert counts(second) == [3, 5, 8]
    assert before.ahead() == forecast


async def test_what_a_deposed_leader_leaves_is_not_taken(coordinators: Coordinators) -> None:
    (first, left), (second, right) = coordinators.new(), coordinators.new()
    epoch = await coordinators.lead()
    await left.take_up({BASE}, epoch)
    newer = await coordinators.lead()
    await right.take_up({BASE}, newer)
    coordinators.bucket(4, first, second)
    await left.leave(epoch)
    assert await coordinators.store.get(keys.demand(BASE), DemandHistory) is None
    await right.leave(newer)
    found = await coordinators.store.get(keys.demand(BASE), DemandHistory)
    assert found is not None
    assert found.value.counts == (4,)


async def test_it_is_left_no_more_often_than_every_so_often(coordinators: Coordinators) -> None:
    first, left = coordinators.new()
    epoch = await coordinators.lead()
    await left.take_up({BASE}, epoch)
    seen = []
    for count in range(1, 7):
        coordinators.bucket(count, first)
        await left.leave(epoch)
        found = await coordinators.store.get(keys.demand(BASE), DemandHistory)
        assert found is not None
        seen.append(len(found.value.counts))
    assert LEAVE_S == 2 * BUCKET_S
    assert seen == [1, 1, 3, 3, 5, 5]


async def test_the_calendar_is_taken_up_too(coordinators: Coordinators) -> None:
    first, left = coordinators.new()
    epoch = await coordinators.lead()
    await left.take_up({BASE}, epoch)
    for _ in range(25):  # two spans and a half
        coordinators.bucket(6, first)
        await left.leave(epoch)
    second, right = coordinators.new()
    await right.take_up({BASE}, await coordinators.lead())
    coordinators.now = SEASON_S + 1.5 * SPAN_S - LEAD_S
    assert second.expected() == first.expected() == {A: pytest.approx(0.6)}


async def test_a_new_leader_leaves_only_spans_that_are_not_there(coordinators: Coordinators) -> None:
    first, left = coordinators.new()
    epoch = await coordinators.lead()
    await left.take_up({BASE}, epoch)
    for _ in range(12):
        coordinators.bucket(6, first)
        await left.leave(epoch)
    place = str(int(1e6 / SPAN_S) % 96)
    other = CalendarSpan(number=int(1e6 / SPAN_S), counts={B: 1})
    await coordinators.store.swap([_noted(place, other)])
    second, right = coordinators.new()
    newer = await coordinators.lead()
    await right.take_up({BASE}, newer)
    for _ in range(20):
        coordinators.bucket(6, second)
        await right.leave(newer)
    kept = await coordinators.store.get_field(keys.CALENDAR, place, CalendarSpan)
    assert kept is not None
    assert kept.value == other


async def test_what_cannot_be_read_is_as_if_nothing_had_been_left(coordinators: Coordinators) -> None:
    await coordinators.store.put(keys.demand(BASE), ["nonsense"])
    await coordinators.store.swap([_noted("3", ["nonsense"])])
    watched, remembrance = coordinators.new()
    epoch = await coordinators.lead()
    await remembrance.take_up({BASE}, epoch)
    coordinators.bucket(4, watched)
    await remembrance.leave(epoch)
    found = await coordinators.store.get(keys.demand(BASE), DemandHistory)
    assert found is not None
    assert found.value.counts == (4,)


async def test_while_the_store_is_away_nothing_counts_as_taken_up(coordinators: Coordinators) -> None:
    first, left = coordinators.new()
    epoch = await coordinators.lead()
    await left.take_up({BASE}, epoch)
    coordinators.bucket(4, first)
    await left.leave(epoch)
    second, right = coordinators.new()
    newer = await coordinators.lead()
    coordinators.store.is_connected = False
    with pytest.raises(Unavailable):
        await right.take_up({BASE}, newer)
    coordinators.store.is_connected = True
    await right.take_up({BASE}, newer)
    assert counts(second) == [4]


def _noted(place: str, value: object) -> Change:
    return Change(keys.CALENDAR, msgspec.UNSET, value, place)
