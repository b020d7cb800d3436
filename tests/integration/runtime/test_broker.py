"""What only a real NATS server can show: freezes, first starts, refusals, and what is on its disk."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import nats
import pytest

from infinilora.protocol import subjects
from infinilora.protocol.control import UsageEvent
from infinilora.protocol.errors import Unavailable
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.outbox import DURABLE_LIMIT
from support.procs import NatsServer
from support.waiting import eventually

pytestmark = pytest.mark.integration


def usage(number: int) -> UsageEvent:
    return UsageEvent(
        request_id=f"r{number}",
        tenant="t",
        model="m",
        digest=None,
        prompt_tokens=1,
        completion_tokens=1,
        finish_reason="stop",
    )


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    yield server
    await asyncio.to_thread(server.kill)


async def on_disk(server: NatsServer) -> int:
    client = await nats.connect(server.url)
    try:
        info = await client.jetstream().stream_info(subjects.USAGE_STREAM)
        return int(info.state.messages)
    finally:
        await client.close()


async def test_a_bus_starts_before_its_broker(server: NatsServer) -> None:
    async with NatsBus(server.url) as bus:
        events = bus.subscribe(subjects.USAGE, UsageEvent)
        await bus.durable_publish(subjects.USAGE, usage(1))
        assert not bus.is_connected
        await asyncio.to_thread(server.start)
        assert (await anext(events)).request_id == "r1"


async def test_a_broker_that_hangs_is_noticed_and_found_again(server: NatsServer) -> None:
    await asyncio.to_thread(server.start)
    async with NatsBus(server.url) as bus:
        assert await bus.wait_connected(5)
        server.freeze()
        await eventually(lambda: not bus.is_connected, "the freeze is noticed")
        server.thaw()
        await eventually(lambda: bus.is_connected, "the broker is back")
        await bus.flush(5)


async def test_a_broker_that_hangs_is_noticed_and_found_again_whatever_it_had_still_to_be_told(
    server: NatsServer,
) -> None:
    await asyncio.to_thread(server.start)
    large = msgspec.structs.replace(usage(1), request_id="r" * 200_000)
    async with NatsBus(server.url) as bus:
        assert await bus.wait_connected(5)
        server.freeze()

        async def talk() -> None:
            for _ in range(100):  # more than two sockets hold
                await bus.publish(subjects.USAGE, large)

        talking = asyncio.get_running_loop().create_task(talk())
        await eventually(lambda: not bus.is_connected, "the freeze is noticed", 10)
        server.thaw()
        await eventually(lambda: bus.is_connected, "the broker is back", 10)
        talking.cancel()
        await asyncio.wait([talking])
        await bus.flush(5)


async def test_a_refused_password_is_retried_and_not_fatal(server: NatsServer) -> None:
    await asyncio.to_thread(server.start)
    right = urlsplit(server.url)
    wrong = right._replace(netloc=f"{right.username}:wrong@127.0.0.1:{right.port}").geturl()
    async with NatsBus(wrong) as bus:
        assert not await bus.wait_connected(0.7)
        server.password = "wrong"
        await asyncio.to_thread(server.restart)
        assert await bus.wait_connected(10)


async def test_what_was_flushed_is_on_disk_when_the_broker_is_killed(server: NatsServer) -> None:
    await asyncio.to_thread(server.start)
    async with NatsBus(server.url) as bus:
        assert await bus.wait_connected(5)
        for number in range(50):
            await bus.durable_publish(subjects.USAGE, usage(number))
        await bus.flush(20)
        server.kill()
        for number in range(50, 80):
            await bus.durable_publish(subjects.USAGE, usage(number))
        await asyncio.to_thread(server.start)
        assert await bus.wait_connected(10)
        await bus.flush(20)
    assert await on_disk(server) == 80


async def test_a_message_that_is_too_large_holds_up_none_behind_it(server: NatsServer) -> None:
    await asyncio.to_thread(server.start)
    async with NatsBus(server.url) as bus:
        assert await bus.wait_connected(5)
        await bus.durable_publish(subjects.USAGE, msgspec.structs.replace(usage(1), model="m" * (2 << 20)))
        await bus.durable_publish(subjects.USAGE, usage(2))
        await bus.flush(10)
    assert await on_disk(server) == 1


async def test_leaving_sends_what_still_waits(server: NatsServer) -> None:
    await asyncio.to_thread(server.start)
    async with NatsBus(server.url) as bus:
        assert await bus.wait_connected(5)
        for number in range(20):
            await bus.durable_publish(subjects.USAGE, usage(number))
    assert await on_disk(server) == 20


async def test_a_full_buffer_refuses_instead_of_forgetting(server: NatsServer) -> None:
    async with NatsBus(server.url) as bus:
        for number in range(DURABLE_LIMIT):
            await bus.durable_publish(subjects.USAGE, usage(number))
        with pytest.raises(Unavailable, match="wait for the broker"):
            await bus.durable_publish(subjects.USAGE, usage(-1))


async def test_a_handler_that_fails_ends_the_block_it_belongs_to(server: NatsServer) -> None:
    await asyncio.to_thread(server.start)

    async def broken(_: UsageEvent) -> UsageEvent:
        raise ZeroDivisionError("a fault of ours")

    async def provoke() -> None:
        async with NatsBus(server.url) as bus, NatsBus(server.url) as other:
            assert await bus.wait_connected(5)
            assert await other.wait_connected(5)
            await bus.serve("test.broken", UsageEvent, broken)
            await bus.flush(5)
            await other.request("test.broken", usage(1), UsageEvent, timeout_s=30)

    with pytest.raises(ExceptionGroup) as caught:
        await provoke()
    assert caught.group_contains(ZeroDivisionError, match="a fault of ours", depth=1)


async def test_an_error_of_the_block_leaves_it_as_it_was(server: NatsServer) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with NatsBus(server.url):
            raise KeyError("mine")
