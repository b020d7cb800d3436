"""The mirror over a memory bus, on a clock of the test's."""

import asyncio

import pytest

from infinilora.protocol import subjects
from infinilora.protocol.control import Beat
from infinilora.runtime.members import Members
from infinilora.runtime.memory import MemoryBus
from support.waiting import eventually

TICK_S = 0.02


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """Beats of some processes, sent when the test says so; one beat is `TICK_S` on the clock."""

    def __init__(self, bus: MemoryBus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._seq = 0

    async def beat(self, *ids: str, advance: float = TICK_S) -> None:
        self._clock.now += advance
        for process_id in ids:
            self._seq += 1
            message = Beat(kind="engine", id=process_id, incarnation="a", seq=self._seq, state="ready")
            await self._bus.publish(subjects.heartbeat("engine", process_id), message)
        await asyncio.sleep(TICK_S)  # several rounds of the mirror


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(bus: MemoryBus, clock: Clock) -> Fleet:
    return Fleet(bus, clock)


def alive(members: Members) -> list[str]:
    return [member.beat.id for member in members.alive("engine")]


async def test_the_mirror_knows_who_beats_and_who_stopped(bus: MemoryBus, clock: Clock, fleet: Fleet) -> None:
    async with Members(bus, interval_s=TICK_S, clock=clock) as members:
        await fleet.beat("e1", "e2", "e3")
        await eventually(lambda: alive(members) == ["e1", "e2", "e3"], "all are known")

        async def is_dead() -> bool:
            await fleet.beat("e1", "e3")
            return alive(members) == ["e1", "e3"]

        await eventually(is_dead, "the silent one is dead")
        assert [m.health for m in members.all()] == ["alive", "dead", "alive"]


async def test_readers_hear_the_present_and_then_every_change(bus: MemoryBus, clock: Clock, fleet: Fleet) -> None:
    async with Members(bus, interval_s=TICK_S, clock=clock) as members:
        await fleet.beat("e1")
        await eventually(lambda: members.get("engine", "e1") is not None, "the first is known")
        changes = members.changes()
        assert (await anext(changes)).member.beat.id == "e1"
        await fleet.beat("e1", "e2")
        change = await anext(changes)
        assert (change.kind, change.member.beat.id) == ("joined", "e2")
    assert [change async for change in changes] == []


async def test_nobody_is_missing_once_all_had_the_time_to_beat(bus: MemoryBus, clock: Clock) -> None:
    bus.set_connected(False)
    async with Members(bus, interval_s=TICK_S, clock=clock) as members:
        clock.now += 10 * TICK_S
        assert not members.has_heard_all, "there was nothing to hear"
        bus.set_connected(True)
        clock.now += TICK_S
        assert not members.has_heard_all
        clock.now += TICK_S
        assert members.has_heard_all
        bus.set_connected(False)
        bus.set_connected(True)
        assert members.has_heard_all, "what was heard is known"


async def test_nobody_dies_of_the_buss_absence(bus: MemoryBus, clock: Clock, fleet: Fleet) -> None:
    async with Members(bus, interval_s=TICK_S, clock=clock) as members:
        await fleet.beat("e1", "e2")
        await eventually(lambda: alive(members) == ["e1", "e2"], "both are known")
        bus.set_connected(False)
        assert members.is_frozen
        for _ in range(10):
            await fleet.beat("e1", "e2")
        assert alive(members) == ["e1", "e2"]
        bus.set_connected(True)
        await fleet.beat("e1", "e2")
        await fleet.beat("e1", "e2", advance=TICK_S * 1.5)
        assert alive(members) == ["e1", "e2"]
        assert not members.is_frozen


async def test_when_all_fall_silent_the_bus_is_proved_before_they_are_dead(
    bus: MemoryBus, clock: Clock, fleet: Fleet
) -> None:
    async with Members(bus, interval_s=TICK_S, clock=clock) as members:
        await fleet.beat("e1", "e2")
        await eventually(lambda: alive(members) == ["e1", "e2"], "both are known")
        await fleet.beat(advance=TICK_S * 1.8)
        await fleet.beat(advance=TICK_S * 1.5)
        assert alive(members) == ["e1", "e2"]

        async def are_dead() -> bool:
            await fleet.beat()
            return alive(members) == []

        await eventually(are_dead, "both are dead after all")
