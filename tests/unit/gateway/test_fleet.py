"""The gateway's calls to engines, what they leave, and what they tell about an engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from msgspec import structs

from infinilora.gateway.fleet import Engine, Fleet
from infinilora.protocol.control import Beat, EngineLoad, ProcessState
from infinilora.protocol.errors import InfiniLoraError, Unavailable
from infinilora.protocol.generate_pb2 import DESCRIPTOR, GenerateRequest, HealthReply, HealthRequest
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.runtime.membership import Health, Member
from infinilora.runtime.rpc import Call, Channels, Unreachable, serving
from support.procs import free_port
from support.waiting import eventually

BASE = Fingerprint("sha256:b")
A = digest_of(b"a")
NOBODY = Engine("e/1", "e", "127.0.0.1:1")


def member(engine: Engine, *, health: Health = "alive", state: ProcessState = "ready") -> Member:
    beat = Beat(kind="engine", id=engine.id, incarnation="1", seq=1, state=state, address=engine.address, base=BASE)
    return Member(beat, 0.0, health=health)


@asynccontextmanager
async def watched(members: Callable[[], list[Member]]) -> AsyncIterator[Fleet]:
    """A fleet that asks for health."""
    async with Channels() as channels, asyncio.TaskGroup() as group:
        fleet = Fleet(members, channels)
        watching = group.create_task(fleet.watch_health())
        yield fleet
        watching.cancel()


class Doctor:
    """Serves health, and nothing else."""

    def __init__(self, error: InfiniLoraError | None = None) -> None:
        self.asked = 0
        self._error = error

    async def check(self, _: HealthRequest, __: Call) -> HealthReply:
        self.asked += 1
        if self._error:
            raise self._error
        return HealthReply()


HEALTH = DESCRIPTOR.services_by_name["EngineHealth"]


async def test_the_channel_to_an_engine_is_kept_until_nobody_is_known_there() -> None:
    members = [member(NOBODY, health="dead")]
    async with Channels() as channels:
        fleet = Fleet(lambda: members, channels)
        for _ in range(2):
            with pytest.raises(Unavailable):
                async for _ in fleet.generate(NOBODY, GenerateRequest(), time.monotonic() + 5):
                    pass
        await fleet.forget_gone()
        assert list(channels._channels) == [NOBODY.address]
        members.clear()
        await fleet.forget_gone()
        assert not channels._channels


@pytest.mark.parametrize("state", ["starting", "draining", "stuck"])
async def test_an_engine_that_is_not_ready_or_is_dead_is_not_picked(state: ProcessState) -> None:
    async with Channels() as channels:
        for unfit in (member(NOBODY, state=state), member(NOBODY, health="dead")):
            assert Fleet(lambda unfit=unfit: [unfit], channels).pick(BASE, None) is None  # type: ignore[misc]  # bound now
        assert Fleet(lambda: [member(NOBODY, health="suspect")], channels).pick(BASE, None) == NOBODY


@pytest.mark.parametrize("load", [EngineLoad(digests=(A,), running=1), EngineLoad(resident=(A,), running=1)])
async def test_an_engine_that_leases_or_holds_an_adapter_is_warm_for_it(load: EngineLoad) -> None:
    warm, idle = Engine("f/1", "f", "127.0.0.1:2"), member(NOBODY)
    beats = [idle, replace(member(warm), beat=structs.replace(member(warm).beat, load=load))]
    async with Channels() as channels:
        fleet = Fleet(lambda: beats, channels)
        assert (fleet.pick(BASE, A), fleet.pick(BASE, None)) == (warm, NOBODY)


@pytest.mark.parametrize("error", [None, Unavailable("I drain")], ids=["well", "says no"])
async def test_one_that_fell_silent_is_left_alone_until_it_answers_whatever_it_says(
    error: InfiniLoraError | None,
) -> None:
    engine, doctor = Engine("e/1", "e", f"127.0.0.1:{free_port()}"), Doctor(error)
    async with watched(lambda: [member(engine)]) as fleet:
        fleet.note_failure(engine, Unreachable("connection refused"))
        assert fleet.pick(BASE, None) is None
        async with serving(engine.address, [(HEALTH, doctor)]):
            await eventually(lambda: fleet.pick(BASE, None) is not None, "the engine")
        assert doctor.asked == 1


async def test_one_that_said_why_it_does_not_is_there() -> None:
    async with Channels() as channels:
        fleet = Fleet(lambda: [member(NOBODY)], channels)
        fleet.note_failure(NOBODY, Unavailable("draining"))
        assert fleet.pick(BASE, None) == NOBODY


async def test_whoever_waits_for_a_change_hears_that_an_engine_answers_again() -> None:
    async with serving("127.0.0.1:0", [(HEALTH, Doctor())]) as server:
        engine = Engine("e/1", "e", server.address)
        async with watched(lambda: [member(engine)]) as fleet:
            fleet.note_failure(engine, Unreachable("reset"))
            assert await fleet.changed(10.0)
            assert fleet.pick(BASE, None) == engine


async def test_the_breaker_of_each_engine_is_told_and_how_often_it_has_opened() -> None:
    other = Engine("o/1", "o", "127.0.0.1:1")
    members = [member(NOBODY), member(other)]
    async with Channels() as channels:
        fleet = Fleet(lambda: members, channels)
        for _ in range(3):  # calls that end at once are one silence
            fleet.note_failure(NOBODY, Unreachable("reset"))
        fleet.note_failure(other, Unavailable("draining"))
        assert fleet.breakers() == [("e", True, 1), ("o", False, 0)]
        reborn = replace(members[0], beat=structs.replace(members[0].beat, incarnation="2"))
        members[0] = reborn
        await fleet.forget_gone()
        assert fleet.breakers() == [("e", False, 1), ("o", False, 0)]
        fleet.note_failure(NOBODY._replace(key="e/2"), Unreachable("reset"))
        assert fleet.breakers() == [("e", True, 2), ("o", False, 0)]
        members.clear()
        await fleet.forget_gone()
        members.append(reborn)
        assert fleet.breakers() == [("e", False, 0)]
