"""Class D, the broker: away and back, with its state or without; out of one gateway's reach; too fast for a reader."""

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import msgspec
import nats
import pytest
from nats.js.errors import NotFoundError

from infinilora.protocol import subjects
from infinilora.protocol.control import UsageEvent
from support.cases import Change
from support.tcp_proxy import TcpProxy
from support.waiting import eventually
from support.worlds import World, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

FLOOD_BYTES = 7 << 20
"""Of one event; the local broker takes 8 MB, and keeps 64 MiB for a reader before it gives it up."""
NUM_FLOOD = 14
SOAK = pytest.param(60, "keeps", marks=[pytest.mark.soak, pytest.mark.timeout(600)])


def broker(world: World) -> str:
    return world.factory.stack._started().shared["INFINILORA_NATS_URL"]


async def billed(world: World) -> Counter[str]:
    """How often each request is in the broker's stream of usage."""
    client = await nats.connect(broker(world))
    try:
        stream = client.jetstream()
        state = (await stream.stream_info(subjects.USAGE_STREAM)).state
        raw = [await stream.get_msg(subjects.USAGE_STREAM, n) for n in range(state.first_seq, state.last_seq + 1)]
        return Counter(msgspec.json.decode(message.data, type=UsageEvent).request_id for message in raw)
    except NotFoundError:  # the stream is not made anew yet
        return Counter()
    finally:
        await client.close()


async def registered_at_last(world: World, name: str, changes: list[Change]) -> None:
    """Served right; for the moment in which this gateway has not heard of it, 404."""
    async with asyncio.timeout(20):
        while True:
            try:
                await world.serves(name, changes)
            except httpx.HTTPStatusError as error:
                assert error.response.status_code == 404, error.response.text
                await asyncio.sleep(0.1)
            else:
                return


@pytest.mark.parametrize(("for_s", "state"), [(5, "keeps"), (3, "loses"), SOAK])
@on("L/engines")
async def test_d25_the_bus_is_away_and_back(running: World, for_s: float, state: str) -> None:
    name = f"d25-{state}-{for_s}"
    changes = await running.made(name, 250)
    await running.serves(name, changes)
    stack = running.factory.stack
    others = {program: pid for program, pid in stack.pids().items() if program != "nats"}
    outage = asyncio.create_task(stack.outage("nats", for_s=for_s))
    await eventually(lambda: stack.pid("nats") is None, "the broker is gone")
    if state == "loses":
        shutil.rmtree(stack.home.directory / "nats" / "jetstream")
    served = [(await running.serves(name, changes)).headers["x-request-id"]]
    during = await running.made(f"{name}-during", 251)
    while not outage.done():
        served.append((await running.serves(name, changes)).headers["x-request-id"])
        await running.serves(f"{name}-during", during)
    await outage
    late = await running.made(f"{name}-late", 252)
    await running.serves(f"{name}-late", late)

    async def is_billed() -> bool:
        return set(served) <= set(await billed(running))

    await eventually(is_billed, "every request of the outage is billed", timeout_s=30)
    assert max((await billed(running)).values()) == 1
    assert {program: pid for program, pid in stack.pids().items() if program != "nats"} == others


@asynccontextmanager
async def another(world: World, name: str, env: dict[str, str]) -> AsyncIterator[World]:
    """The same world through a second gateway."""
    api = await world.factory.another_gateway(name, env)
    child = world.factory.children[-1]
    try:
        yield replace(world, api=api)
    finally:
        await child.stop()


@on("L/engines")
async def test_d25_a_gateway_that_alone_is_cut_off_serves_on(running: World) -> None:
    changes, url = await running.made("d25-cut", 253), urlsplit(broker(running))
    assert url.port is not None
    async with TcpProxy(url.port) as proxy:
        through = url._replace(netloc=f"{url.username}:{url.password}@127.0.0.1:{proxy.port}").geturl()
        async with another(running, "gateway-d25-cut", {"INFINILORA_NATS_URL": through}) as cut_off:
            await cut_off.serves("d25-cut", changes)
            proxy.hold()
            await cut_off.api.wait("/readyz", lambda told: told["away"] == ["nats"], within_s=30)
            engine = running.factory.stack.pid("engine")
            assert engine is not None
            os.killpg(engine, signal.SIGKILL)  # of which it does not hear
            await asyncio.gather(*(cut_off.serves("d25-cut", changes) for _ in range(8)))
            late = await running.made("d25-cut-late", 254)
            await registered_at_last(cut_off, "d25-cut-late", late)
            proxy.release()
            await cut_off.api.wait("/readyz", lambda told: told["status"] == "ready", within_s=30)
            await running.until_ready("engine", 2)
            await asyncio.gather(*(cut_off.serves("d25-cut", changes) for _ in range(8)))


async def flood(world: World) -> None:
    """Events that parse as none, each once a reader like the others has the one before."""
    client = await nats.connect(broker(world))
    try:
        events = await client.subscribe(subjects.ADAPTER_EVENTS)
        for _ in range(NUM_FLOOD):
            await client.publish(subjects.ADAPTER_EVENTS, bytes(FLOOD_BYTES))
            while len((await events.next_msg(timeout=30)).data) != FLOOD_BYTES:
                continue
    finally:
        await client.close()


@on("L/engines")
async def test_d25_a_reader_too_slow_for_the_broker_comes_back_whole(running: World) -> None:
    """A gateway is stopped while the broker has more for it than it keeps, and an adapter is registered elsewhere."""
    changes = await running.made("d25-slow", 255)
    async with another(running, "gateway-d25-slow", {}) as slow:
        await slow.serves("d25-slow", changes)
        pid = running.factory.children[-1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await flood(running)
            log = running.factory.stack.log("nats")
            await eventually(lambda: "Slow Consumer" in log.read_text(), "the broker gives the reader up", timeout_s=30)
            late = await running.made("d25-slow-late", 256)
        finally:
            os.kill(pid, signal.SIGCONT)
        await registered_at_last(slow, "d25-slow-late", late)
        await slow.api.wait("/readyz", lambda told: told["status"] == "ready", within_s=30)
        await slow.serves("d25-slow", changes)
    await running.serves("d25-slow-late", late)
