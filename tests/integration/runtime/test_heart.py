"""Heartbeats over a real broker: from a busy process, through the broker's death, to the mirror."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from infinilora.protocol import subjects
from infinilora.protocol.control import Beat, Death
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.members import SUCCESSION_BEATS, Heart, Members
from support.procs import NatsServer
from support.waiting import eventually

pytestmark = pytest.mark.integration

INTERVAL_S = 0.2


def build() -> Beat:
    return Beat(kind="engine", id="e1", incarnation="life", seq=0, state="ready", address="127.0.0.1:1")


async def test_a_loop_that_is_busy_still_beats(nats_server: NatsServer) -> None:
    async with NatsBus(nats_server.url) as bus:
        await bus.wait_connected(5)
        beats = bus.subscribe(subjects.heartbeats("engine"), Beat)
        await bus.flush()
        heart = asyncio.get_running_loop().create_task(Heart(nats_server.url, build, interval_s=INTERVAL_S).run())
        first = await anext(beats)
        time.sleep(10 * INTERVAL_S)  # noqa: ASYNC251 - the busy loop is the subject
        await bus.flush()
        later = beats.pop_all()
        heart.cancel()
        await asyncio.wait([heart])
    assert [beat.seq for beat in later] == list(range(first.seq + 1, first.seq + 1 + len(later)))
    assert len(later) >= 5


async def test_a_change_of_state_does_not_wait_for_the_interval(nats_server: NatsServer) -> None:
    async with NatsBus(nats_server.url) as bus:
        await bus.wait_connected(5)
        beats = bus.subscribe(subjects.heartbeats("engine"), Beat)
        heart = Heart(nats_server.url, build, interval_s=3600)
        task = asyncio.get_running_loop().create_task(heart.run())
        first = await anext(beats)
        heart.beat_now()
        async with asyncio.timeout(5):
            assert (await anext(beats)).seq > first.seq
        task.cancel()
        await asyncio.wait([task])


async def test_a_builder_that_fails_is_heard_of(nats_server: NatsServer) -> None:
    def broken() -> Beat:
        raise ValueError("no beat")

    with pytest.raises(ValueError, match="no beat"):
        await Heart(nats_server.url, broken, interval_s=INTERVAL_S).run()


async def test_a_process_that_was_called_dead_beats_on_as_another_life(nats_server: NatsServer) -> None:
    async with NatsBus(nats_server.url) as bus, Members(bus, interval_s=INTERVAL_S) as members:
        await bus.wait_connected(5)
        heart = asyncio.get_running_loop().create_task(Heart(nats_server.url, build, interval_s=INTERVAL_S).run())

        def lives(incarnation: str) -> bool:
            member = members.get("engine", "e1")
            return member is not None and (member.beat.incarnation, member.health) == (incarnation, "alive")

        await eventually(lambda: lives("life"), "the engine is known")
        for epoch, called, wanted in ((7, "life", "life.1"), (7, "life.1", "life.2"), (6, "life.2", "life.3")):
            await bus.publish(subjects.DEATHS, Death(kind="engine", id="e1", incarnation=called, epoch=epoch))
            await eventually(lambda life=wanted: lives(life), f"it lives as {wanted}")  # type: ignore[misc]
        heart.cancel()
        await asyncio.wait([heart])


async def test_of_two_processes_under_one_id_each_says_so_once(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    def build_other() -> Beat:
        return msgspec.structs.replace(build(), incarnation="other")

    def said() -> int:
        return sum("another process has this id" in record.message for record in caplog.records)

    loop = asyncio.get_running_loop()
    async with NatsBus(nats_server.url) as bus:
        await bus.wait_connected(5)
        beats = bus.subscribe(subjects.heartbeats("engine"), Beat)
        first = loop.create_task(Heart(nats_server.url, build, interval_s=0.05).run())
        while (await anext(beats)).seq < 2 * SUCCESSION_BEATS:
            continue
        await bus.publish(subjects.DEATHS, Death(kind="engine", id="e1", incarnation="life", epoch=1))
        while (await anext(beats)).incarnation != "life.1":
            continue
        assert said() == 0, "its own earlier life is nobody else"
        second = loop.create_task(Heart(nats_server.url, build_other, interval_s=0.05).run())
        while (beat := await anext(beats)).incarnation != "other" or beat.seq < 4 * SUCCESSION_BEATS:
            continue
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second])
    assert said() == 2


async def test_the_mirror_lives_through_the_brokers_death_and_notices_a_process_own(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats").start()
    loop = asyncio.get_running_loop()
    try:
        async with NatsBus(server.url) as bus, Members(bus, interval_s=INTERVAL_S) as members:
            heart = loop.create_task(Heart(server.url, build, interval_s=INTERVAL_S).run())
            await eventually(lambda: len(members.alive("engine")) == 1, "the engine is known")
            server.kill()
            await eventually(lambda: members.is_frozen, "the mirror freezes")
            await asyncio.sleep(6 * INTERVAL_S)
            assert len(members.alive("engine")) == 1
            await asyncio.to_thread(server.start)
            await eventually(lambda: not members.is_frozen, "the mirror thaws")
            await eventually(lambda: [m.health for m in members.all()] == ["alive"], "the engine beats again")
            heart.cancel()
            await eventually(lambda: [m.health for m in members.all()] == ["dead"], "the engine is dead")
            await asyncio.wait([heart])
    finally:
        server.kill()
