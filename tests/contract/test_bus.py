"""What every bus promises, in memory and over a real NATS server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from infinilora.protocol import subjects
from infinilora.protocol.control import Command, CommandReply, Stage, UsageEvent
from infinilora.protocol.errors import AdapterNotFound, Internal, InvalidRequest, StaleEpoch, Unavailable
from infinilora.protocol.ids import digest_of
from infinilora.runtime import telemetry
from infinilora.runtime.bus import Bus, NatsBus
from infinilora.runtime.memory import MemoryBus
from support.procs import NatsServer
from support.waiting import eventually


class Note(msgspec.Struct, frozen=True):
    text: str


class Cluster:
    """A broker that can go and come back, and as many buses on it as a test wants."""

    def __init__(self, broker: NatsServer | MemoryBus, stack: AsyncExitStack) -> None:
        self._broker = broker
        self._stack = stack

    async def bus(self) -> Bus:
        if isinstance(self._broker, MemoryBus):
            return self._broker
        bus = await self._stack.enter_async_context(NatsBus(self._broker.url))
        assert await bus.wait_connected(5)
        return bus

    async def go_away(self, *buses: Bus) -> None:
        if isinstance(self._broker, MemoryBus):
            self._broker.set_connected(False)
        else:
            self._broker.kill()
        await eventually(lambda: not any(bus.is_connected for bus in buses), "the loss is noticed")

    async def come_back(self, *buses: Bus) -> None:
        if isinstance(self._broker, MemoryBus):
            self._broker.set_connected(True)
        else:
            await asyncio.to_thread(self._broker.start)
        await eventually(lambda: all(bus.is_connected for bus in buses), "the broker is back")


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.integration)])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    broker = MemoryBus() if request.param == "memory" else request.getfixturevalue("nats_server")
    async with AsyncExitStack() as stack:
        yield Cluster(broker, stack)


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.integration)])
async def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster whose broker the test may kill."""
    if request.param == "memory":
        async with AsyncExitStack() as stack:
            yield Cluster(MemoryBus(), stack)
        return
    server = NatsServer(tmp_path / "nats").start()
    try:
        async with AsyncExitStack() as stack:
            yield Cluster(server, stack)
    finally:
        server.kill()


@pytest.fixture
def subject() -> str:
    return f"test.{uuid4().hex}"


async def test_an_event_reaches_every_subscriber(cluster: Cluster, subject: str) -> None:
    mine, other = await cluster.bus(), await cluster.bus()
    first, second = mine.subscribe(subject, Note), other.subscribe(subject, Note)
    await other.flush()
    await mine.publish(subject, Note("hello"))
    assert await anext(first) == Note("hello")
    assert await anext(second) == Note("hello")


async def test_a_pattern_hears_all_subjects_it_covers(cluster: Cluster, subject: str) -> None:
    bus = await cluster.bus()
    beats = bus.subscribe(f"{subject}.*.*", Note)
    await bus.publish(f"{subject}.engine", Note("too short"))
    await bus.publish(f"{subject}.engine.e1", Note("yes"))
    await bus.publish(f"{subject}.engine.e1.x", Note("too long"))
    await bus.publish(f"{subject}.gateway.g1", Note("yes, too"))
    assert [await anext(beats), await anext(beats)] == [Note("yes"), Note("yes, too")]
    await bus.flush()
    assert beats.pop_all() == []


async def test_a_closed_subscription_ends_and_hears_no_more(cluster: Cluster, subject: str) -> None:
    bus = await cluster.bus()
    notes = bus.subscribe(subject, Note)
    await bus.publish(subject, Note("one"))
    assert await anext(notes) == Note("one")
    notes.close()
    await bus.publish(subject, Note("two"))
    await bus.flush()
    assert [note async for note in notes] == []


async def test_an_event_of_another_shape_is_counted_and_harms_nothing(cluster: Cluster, subject: str) -> None:
    bus = await cluster.bus()
    commands = bus.subscribe(subject, Command)
    await bus.publish(subject, Note("not a command"))
    await bus.publish(subject, Command(command_id="c", epoch=1, body=Stage(digest=digest_of(b"a"))))
    assert (await anext(commands)).command_id == "c"
    assert commands.dropped == 1


async def test_a_request_is_answered_by_its_handler(cluster: Cluster, subject: str) -> None:
    server, client = await cluster.bus(), await cluster.bus()

    async def handle(command: Command) -> CommandReply:
        return CommandReply(command_id=command.command_id)

    await server.serve(subject, Command, handle)
    await server.flush()
    command = Command(command_id="c1", epoch=3, body=Stage(digest=digest_of(b"a")))
    assert await client.request(subject, command, CommandReply, timeout_s=2) == CommandReply(command_id="c1")


@pytest.mark.parametrize("leaf", [StaleEpoch, AdapterNotFound])
async def test_the_caller_gets_the_handlers_own_error(cluster: Cluster, subject: str, leaf: type[StaleEpoch]) -> None:
    bus = await cluster.bus()

    async def refuse(_: Note) -> Note:
        raise leaf("epoch 3 is older than 4", param="epoch")

    await bus.serve(subject, Note, refuse)
    with pytest.raises(leaf, match="older than 4") as caught:
        await bus.request(subject, Note("x"), Note, timeout_s=2)
    assert caught.value.param == "epoch"


async def test_a_request_that_does_not_parse_is_refused(cluster: Cluster, subject: str) -> None:
    bus = await cluster.bus()

    async def never(_: Command) -> CommandReply:
        raise AssertionError("not reached")

    await bus.serve(subject, Command, never)
    with pytest.raises(InvalidRequest, match="does not parse"):
        await bus.request(subject, Note("x"), CommandReply, timeout_s=2)


async def test_a_reply_of_another_shape_is_named(cluster: Cluster, subject: str) -> None:
    bus = await cluster.bus()

    async def echo(note: Note) -> Note:
        return note

    await bus.serve(subject, Note, echo)
    with pytest.raises(Internal, match="not a CommandReply"):
        await bus.request(subject, Note("x"), CommandReply, timeout_s=2)


async def test_nobody_there_is_said_at_once(cluster: Cluster, subject: str) -> None:
    bus = await cluster.bus()
    with pytest.raises(Unavailable, match="nobody"):
        await bus.request(subject, Note("x"), Note, timeout_s=30)


async def test_a_slow_handler_is_bounded_by_the_callers_deadline(cluster: Cluster, subject: str) -> None:
    bus = await cluster.bus()
    forever = asyncio.Event()

    async def hang(note: Note) -> Note:
        await forever.wait()
        return note

    await bus.serve(subject, Note, hang)
    with pytest.raises(Unavailable, match="no answer"):
        await bus.request(subject, Note("x"), Note, timeout_s=0.05)
    forever.set()


async def test_a_slow_handler_does_not_hold_up_the_next_request(cluster: Cluster, subject: str) -> None:
    bus = await cluster.bus()
    gate = asyncio.Event()

    async def handle(note: Note) -> Note:
        if note.text == "slow":
            await gate.wait()
        return note

    await bus.serve(subject, Note, handle)
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(bus.request(subject, Note("slow"), Note, timeout_s=5))
        assert await bus.request(subject, Note("quick"), Note, timeout_s=5) == Note("quick")
        gate.set()
    assert slow.result() == Note("slow")


async def test_the_trace_goes_with_a_request(cluster: Cluster, subject: str) -> None:
    bus = await cluster.bus()
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def tell(_: Note) -> Note:
        return Note(telemetry.traceparent() or "none")

    await bus.serve(subject, Note, tell)
    with telemetry.attached(telemetry.from_traceparent(header)):
        assert await bus.request(subject, Note("x"), Note, timeout_s=2) == Note(header)


async def test_events_are_dropped_and_counted_while_the_broker_is_away(mortal: Cluster, subject: str) -> None:
    bus = await mortal.bus()
    states: list[bool] = []
    bus.on_state(states.append)
    await mortal.go_away(bus)
    await bus.publish(subject, Note("lost"))
    assert bus.dropped_events == 1
    with pytest.raises(Unavailable, match="away"):
        await bus.request(subject, Note("x"), Note, timeout_s=30)
    await mortal.come_back(bus)
    assert states == [True, False, True]


async def test_subscriptions_and_handlers_survive_the_brokers_death(mortal: Cluster, subject: str) -> None:
    bus = await mortal.bus()
    before = bus.subscribe(subject, Note)

    async def echo(note: Note) -> Note:
        return note

    await bus.serve(f"{subject}.echo", Note, echo)
    await mortal.go_away(bus)
    during = bus.subscribe(subject, Note)
    await mortal.come_back(bus)
    await bus.publish(subject, Note("again"))
    assert await anext(before) == Note("again")
    assert await anext(during) == Note("again")
    assert await bus.request(f"{subject}.echo", Note("x"), Note, timeout_s=5) == Note("x")


def usage(number: int) -> UsageEvent:
    return UsageEvent(
        request_id=f"r{number}",
        tenant="default",
        model="m",
        digest=None,
        prompt_tokens=1,
        completion_tokens=number,
        finish_reason="stop",
    )


async def test_durable_messages_wait_for_the_broker_and_come_in_order(mortal: Cluster) -> None:
    bus = await mortal.bus()
    await bus.durable_publish(subjects.USAGE, usage(0))
    await bus.flush(5)
    events = bus.subscribe(subjects.USAGE, UsageEvent)
    await mortal.go_away(bus)
    for number in range(1, 6):
        await bus.durable_publish(subjects.USAGE, usage(number))
    await mortal.come_back(bus)
    await bus.flush(10)
    assert [(await anext(events)).request_id for _ in range(5)] == ["r1", "r2", "r3", "r4", "r5"]
    assert events.pop_all() == []
