"""A gRPC peer that stops answering without closing its socket is noticed, from either end; a killed one at once."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from typing_extensions import override

from infinilora.protocol import generate_pb2
from infinilora.protocol.errors import Unavailable
from infinilora.runtime.rpc import Call, Channels, Client, serving
from support.procs import Server

pytestmark = pytest.mark.integration

ENGINE = generate_pb2.DESCRIPTOR.services_by_name["Engine"]
BODY = """
import asyncio, sys
from infinilora.protocol import generate_pb2
from infinilora.runtime.rpc import serving
class Engine:
    async def generate(self, request, call):
        yield generate_pb2.GenerateEvent(token=generate_pb2.Token(id=1))
        await asyncio.Event().wait()
async def main():
    service = generate_pb2.DESCRIPTOR.services_by_name["Engine"]
    async with serving(f"127.0.0.1:{sys.argv[1]}", [(service, Engine())]):
        await asyncio.Event().wait()
asyncio.run(main())
"""


CALLER = """
import asyncio, sys
from infinilora.protocol import generate_pb2
from infinilora.runtime.rpc import Channels
async def main():
    service = generate_pb2.DESCRIPTOR.services_by_name["Engine"]
    async with Channels() as channels:
        client = channels.client(service, f"127.0.0.1:{sys.argv[1]}")
        async for _ in client.stream("Generate", generate_pb2.GenerateRequest()):
            pass
asyncio.run(main())
"""


class Engine(Server):
    """Gives one token and then waits for ever."""

    name = "engine"

    @override
    def command(self) -> list[str]:
        return [sys.executable, "-c", BODY, str(self.port)]


@asynccontextmanager
async def an_open_stream(home: Path) -> AsyncIterator[tuple[Engine, AsyncIterator[generate_pb2.GenerateEvent]]]:
    engine = Engine(home)
    await asyncio.to_thread(engine.start)
    try:
        async with Channels() as channels:
            client: Client = channels.client(ENGINE, f"127.0.0.1:{engine.port}")
            async with aclosing(client.stream("Generate", generate_pb2.GenerateRequest())) as events:
                await anext(events)
                yield engine, events
    finally:
        engine.kill()


@pytest.mark.parametrize(("how", "within_s"), [("kill", 3.0), ("freeze", 6.0)])
async def test_an_open_stream_ends_soon_after_its_peer(tmp_path: Path, how: str, within_s: float) -> None:
    async with an_open_stream(tmp_path) as (engine, events):
        started = time.monotonic()
        await asyncio.to_thread(engine.kill if how == "kill" else engine.freeze)
        with pytest.raises(Unavailable, match=r"Engine\.Generate"):
            await anext(events)
        assert time.monotonic() - started < within_s


class Generator:
    """Knows when a call has begun and when it was given up."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def generate(
        self, request: generate_pb2.GenerateRequest, call: Call
    ) -> AsyncIterator[generate_pb2.GenerateEvent]:
        self.begun.set()
        try:
            yield generate_pb2.GenerateEvent(token=generate_pb2.Token(id=1))
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, 6.0)])
async def test_a_handler_ends_soon_after_its_caller(number: signal.Signals, within_s: float) -> None:
    generator = Generator()
    async with serving("127.0.0.1:0", [(ENGINE, generator)]) as server:
        caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, str(server.port))
        await generator.begun.wait()
        started = time.monotonic()
        caller.send_signal(number)
        await generator.ended.wait()
        assert time.monotonic() - started < within_s
        if number != signal.SIGKILL:
            caller.kill()
        await caller.wait()
