"""Calls over a real loopback gRPC server: replies, errors, cancellation, tokens, traces."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from infinilora.protocol import generate_pb2, lora_pb2
from infinilora.protocol.errors import (
    AdapterLoading,
    ContextLengthExceeded,
    DeadlineExceeded,
    InfiniLoraError,
    Internal,
    Overloaded,
    Unavailable,
)
from infinilora.runtime import telemetry
from infinilora.runtime.rpc import Call, Channels, Client, Duplex, serving
from support.procs import free_port

ENGINE = generate_pb2.DESCRIPTOR.services_by_name["Engine"]
LORA = lora_pb2.DESCRIPTOR.services_by_name["LoraServer"]
HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Engine:
    """Replies as the request's id says."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.calls: list[Call] = []
        self.trace: str | None = None

    async def generate(
        self, request: generate_pb2.GenerateRequest, call: Call
    ) -> AsyncIterator[generate_pb2.GenerateEvent]:
        self.calls.append(call)
        self.trace = telemetry.traceparent()
        try:
            match request.request_id:
                case "count":
                    for number in request.token_ids:
                        yield generate_pb2.GenerateEvent(token=generate_pb2.Token(id=number))
                case "fail late":
                    yield generate_pb2.GenerateEvent(token=generate_pb2.Token(id=1))
                    raise AdapterLoading("on its way", retry_after_s=2.5)
                case "too long":
                    raise ContextLengthExceeded("9 + 9 > 16", param="max_tokens")
                case "bug":
                    raise ZeroDivisionError("a fault of ours")
                case _:
                    yield generate_pb2.GenerateEvent(token=generate_pb2.Token(id=1))
                    await asyncio.Event().wait()
        finally:
            self.closed.set()


class LoraServer:
    """Grants every lease it is asked for."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def open_link(
        self, requests: AsyncIterator[lora_pb2.EngineMessage], call: Call
    ) -> AsyncIterator[lora_pb2.ServerMessage]:
        try:
            async for message in requests:
                if message.lease.digest == "refuse":
                    raise Overloaded("full", retry_after_s=1)
                yield lora_pb2.ServerMessage(granted=lora_pb2.LeaseGranted(digest=message.lease.digest))
        finally:
            self.closed.set()


@asynccontextmanager
async def engine_and_client(token: str = "") -> AsyncIterator[tuple[Engine, Client]]:
    engine = Engine()
    async with serving("127.0.0.1:0", [(ENGINE, engine)], token=token) as server, Channels(token=token) as channels:
        yield engine, channels.client(ENGINE, server.address)


def ask(kind: str, *numbers: int) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(request_id=kind, token_ids=numbers)


async def test_a_stream_arrives_whole_and_in_order() -> None:
    async with engine_and_client() as (_, client):
        found = [event.token.id async for event in client.stream("Generate", ask("count", *range(500)))]
    assert found == list(range(500))


async def test_an_error_arrives_as_the_leaf_it_was() -> None:
    async with engine_and_client() as (_, client):
        with pytest.raises(ContextLengthExceeded, match=r"9 \+ 9 > 16") as caught:
            await anext(client.stream("Generate", ask("too long")))
    assert caught.value.param == "max_tokens"


async def test_an_error_after_replies_comes_after_them() -> None:
    async with engine_and_client() as (_, client):
        events = client.stream("Generate", ask("fail late"))
        assert (await anext(events)).token.id == 1
        with pytest.raises(AdapterLoading, match="on its way") as caught:
            await anext(events)
    assert caught.value.retry_after_s == 2.5


async def test_a_fault_of_the_handler_is_internal() -> None:
    async with engine_and_client() as (_, client):
        with pytest.raises(Internal, match="a fault of ours"):
            await anext(client.stream("Generate", ask("bug")))


async def test_a_caller_that_leaves_closes_the_handler_at_once() -> None:
    async with engine_and_client() as (engine, client):
        async with aclosing(client.stream("Generate", ask("for ever"))) as events:
            await anext(events)
        async with asyncio.timeout(2):
            await engine.closed.wait()


async def test_the_callers_deadline_ends_the_call_on_both_sides() -> None:
    async with engine_and_client() as (engine, client):
        with pytest.raises(DeadlineExceeded):
            async for _ in client.stream("Generate", ask("for ever"), timeout_s=0.2):
                pass
        async with asyncio.timeout(2):
            await engine.closed.wait()
    left = engine.calls[0].time_left_s()
    assert left is not None
    assert left < 0.2


async def test_nobody_at_the_address_is_unavailable_at_once() -> None:
    async with Channels() as channels:
        client = channels.client(ENGINE, f"127.0.0.1:{free_port()}")
        with pytest.raises(Unavailable, match="refused"):
            await anext(client.stream("Generate", ask("count", 1)))


async def test_a_server_that_comes_back_is_found_again() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with Channels() as channels:
        client = channels.client(ENGINE, address)
        for _ in range(2):
            async with serving(address, [(ENGINE, Engine())]):
                async with asyncio.timeout(5):
                    while True:
                        try:
                            assert [e.token.id async for e in client.stream("Generate", ask("count", 7))] == [7]
                            break
                        except Unavailable:
                            await asyncio.sleep(0.02)
            with pytest.raises(Unavailable):
                await anext(client.stream("Generate", ask("count", 7)))


async def test_a_port_in_use_is_said() -> None:
    async with serving("127.0.0.1:0", [(ENGINE, Engine())]) as server:
        with pytest.raises(Unavailable, match=str(server.port)):
            async with serving(server.address, [(ENGINE, Engine())]):
                raise AssertionError("two servers on one port")


async def test_a_call_without_the_token_is_refused() -> None:
    async with serving("127.0.0.1:0", [(ENGINE, Engine())], token="secret") as server:
        for token in ("", "wrong"):
            async with Channels(token=token) as channels:
                with pytest.raises(InfiniLoraError, match="token"):
                    await anext(channels.client(ENGINE, server.address).stream("Generate", ask("count", 1)))
        async with Channels(token="secret") as channels:
            events = channels.client(ENGINE, server.address).stream("Generate", ask("count", 1))
            assert [event.token.id async for event in events] == [1]


async def test_the_trace_goes_with_the_call() -> None:
    async with engine_and_client() as (engine, client):
        with telemetry.attached(telemetry.from_traceparent(HEADER)):
            assert [event async for event in client.stream("Generate", ask("count", 1))]
        assert engine.trace == HEADER
        assert [event async for event in client.stream("Generate", ask("count", 1))]
        assert engine.trace is None


async def test_a_message_of_many_megabytes_passes() -> None:
    numbers = range(1 << 28, (1 << 28) + (2 << 20))  # 5 bytes each: 10 MiB, past gRPC's default of 4
    async with engine_and_client() as (_, client):
        events = client.stream("Generate", ask("count", *numbers))
        async with aclosing(events):
            assert (await anext(events)).token.id == 1 << 28


async def test_both_directions_of_a_duplex_are_open_at_once() -> None:
    servant = LoraServer()
    async with serving("127.0.0.1:0", [(LORA, servant)]) as server, Channels() as channels:
        async with channels.client(LORA, server.address).duplex("OpenLink") as link:
            replies = aiter(link)
            for digest in ("a", "b"):
                await link.send(lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest=digest)))
                assert (await anext(replies)).granted.digest == digest
            await link.finish()
            assert [reply async for reply in replies] == []
        await servant.closed.wait()


async def test_leaving_a_duplex_is_its_end_for_the_server() -> None:
    servant = LoraServer()
    async with serving("127.0.0.1:0", [(LORA, servant)]) as server, Channels() as channels:
        async with channels.client(LORA, server.address).duplex("OpenLink") as link:
            await link.send(lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest="a")))
            await anext(aiter(link))
        async with asyncio.timeout(2):
            await servant.closed.wait()


async def test_an_error_ends_a_duplex_as_a_leaf() -> None:
    async with (
        serving("127.0.0.1:0", [(LORA, LoraServer())]) as server,
        Channels() as channels,
        channels.client(LORA, server.address).duplex("OpenLink") as link,
    ):
        await link.send(lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest="refuse")))
        with pytest.raises(Overloaded, match="full"):
            await anext(aiter(link))


async def test_a_peer_that_ends_a_call_while_it_is_written_to_is_away_and_no_fault_of_ours() -> None:
    message = lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest="a" * (4 << 20)))
    async with serving("127.0.0.1:0", [(ENGINE, Engine())]) as server, Channels() as channels:
        for _ in range(40):
            async with channels.client(LORA, server.address).duplex("OpenLink") as link:
                with pytest.raises(Unavailable):
                    await send_for_ever(link, message)


async def send_for_ever(link: Duplex, message: lora_pb2.EngineMessage) -> None:
    while True:
        await link.send(message)


async def test_a_stranger_can_ask_which_services_there_are() -> None:
    async with (
        serving("127.0.0.1:0", [(ENGINE, Engine()), (LORA, LoraServer())]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await anext(aiter(call))
        names = {service.name for service in answer.list_services_response.service}
        call.cancel()
    assert {"infinilora.v1.Engine", "infinilora.v1.LoraServer"} <= names


async def test_a_server_that_stops_ends_open_streams_with_unavailable_not_with_cancellation() -> None:
    async with Channels() as channels, AsyncExitStack() as stack:
        services = [(ENGINE, Engine()), (LORA, LoraServer())]
        server = await stack.enter_async_context(serving("127.0.0.1:0", services, grace_s=0.1))
        events = channels.client(ENGINE, server.address).stream("Generate", ask("for ever"))
        await anext(events)
        async with channels.client(LORA, server.address).duplex("OpenLink") as link:
            await link.send(lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest="a")))
            replies = aiter(link)
            await anext(replies)
            closing = asyncio.get_running_loop().create_task(stack.aclose())
            with pytest.raises(Unavailable):
                await anext(events)
            with pytest.raises(Unavailable):
                await anext(replies)
            await closing
            with pytest.raises(Unavailable):
                await link.send(lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest="b")))


async def test_closing_a_duplex_under_its_reader_is_an_error_for_the_reader_and_no_cancellation() -> None:
    async with serving("127.0.0.1:0", [(LORA, LoraServer())]) as server, Channels() as channels:
        async with channels.client(LORA, server.address).duplex("OpenLink") as link:

            async def read_one() -> lora_pb2.ServerMessage:
                return await anext(aiter(link))

            await link.send(lora_pb2.EngineMessage(lease=lora_pb2.LeaseRequest(digest="a")))
            assert (await read_one()).granted.digest == "a"
            waiting = asyncio.get_running_loop().create_task(read_one())
            await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="closed here"):
            await waiting
