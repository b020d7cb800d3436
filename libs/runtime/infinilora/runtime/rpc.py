"""gRPC from the descriptors of the `.proto` files: no generated stubs, one error road, one set of timeouts.

A server implements a service as an object with one method per rpc, named in snake_case:

    class Engine:
        async def generate(self, request, call: Call):         # stream reply: an async generator
            yield generate_pb2.GenerateEvent(...)

    async with serving("127.0.0.1:0", [(SERVICE, Engine())], token="...") as server: server.address

A client names the rpc as the proto does:

    async for event in channels.client(SERVICE, address).stream("Generate", request): ...

An `InfiniLoraError` raised by a handler arrives as the same leaf at the caller. A handler that fails otherwise
is logged by gRPC and arrives as `Internal`. A dead peer is noticed within about two seconds.
"""

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
import msgspec
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection as grpc_reflection
from opentelemetry.context import Context

from infinilora.protocol.errors import (
    DeadlineExceeded,
    InfiniLoraError,
    Internal,
    Overloaded,
    Unavailable,
    WireError,
    from_wire,
)
from infinilora.runtime import telemetry

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
Message: TypeAlias = Any
"""A protobuf message; which one is the descriptor's business."""

ERROR_KEY = "infinilora-error-bin"
AUTH_HEADER = "authorization"
MAX_MESSAGE_BYTES = 64 << 20

_BOTH_ENDS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    # Without it the answer to a keepalive ping may take a minute, whatever the line above says (grpcio 1.85).
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER = [
    *_BOTH_ENDS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]
_CLIENT = [
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]

_STATUS_OF_HTTP = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.FAILED_PRECONDITION,
    424: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.UNAVAILABLE,
}


class Unreachable(Unavailable):
    """The peer said nothing itself: it could not be asked, or it went away before it had answered."""


_LEAF_OF_STATUS: dict[grpc.StatusCode, type[InfiniLoraError]] = {
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.CANCELLED: Unreachable,
    grpc.StatusCode.UNIMPLEMENTED: Unavailable,  # a peer that is older than the call
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}
"""For an answer that carries no error of ours: the transport's own failures."""
_UNHEARD = "Internal error from Core"
"""gRPC's words where a write failed because the peer had ended the call; they stand in place of what the peer said."""


# Serving ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler may know of the call beside its request. Its trace context is already current."""

    peer: str
    metadata: dict[str, str | bytes]
    time_left_s: Callable[[], float | None]
    """Seconds until the caller's deadline; None when it set none."""


@dataclass(frozen=True, slots=True)
class Server:
    """A listening server; `address` holds the real port."""

    address: str
    port: int


@asynccontextmanager
async def serving(
    address: str,
    services: Sequence[tuple[ServiceDescriptor, object]],
    *,
    token: str = "",
    reflection: bool = True,
    grace_s: float = 1.0,
) -> AsyncIterator[Server]:
    """Serve until the block ends, then give running calls `grace_s` seconds. Port 0 takes a free one."""
    server = grpc.aio.server(options=_SERVER, interceptors=[_TokenGate(token)] if token else [])
    names = []
    for descriptor, implementation in services:
        names.append(descriptor.full_name)
        handlers = {method.name: _handler(method, implementation) for method in descriptor.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(descriptor.full_name, handlers),))
    if reflection:
        grpc_reflection.enable_server_reflection((*names, grpc_reflection.SERVICE_NAME), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}: {error}") from error
    await server.start()
    try:
        yield Server(f"{address.rpartition(':')[0]}:{port}", port)
    finally:
        await server.stop(grace_s)


def _handler(method: MethodDescriptor, implementation: object) -> Any:
    body = getattr(implementation, _snake(method.name))
    codec = {
        "request_deserializer": GetMessageClass(method.input_type).FromString,
        "response_serializer": GetMessageClass(method.output_type).SerializeToString,
    }
    # Streams are written with context.write from a coroutine, not by returning the generator to gRPC: only so
    # is the generator closed, and its `finally` run, at the moment the caller goes away.
    if method.server_streaming:

        async def stream(request: Message, context: Any) -> None:
            with telemetry.attached(_trace_of(context)):
                async with _errors_to(context), aclosing(body(request, _call(context))) as replies:
                    async for reply in replies:
                        await context.write(reply)

        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, **codec)
        return grpc.unary_stream_rpc_method_handler(stream, **codec)

    async def unary(request: Message, context: Any) -> Message:
        with telemetry.attached(_trace_of(context)):
            async with _errors_to(context):
                return await body(request, _call(context))

    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(unary, **codec)
    return grpc.unary_unary_rpc_method_handler(unary, **codec)


@asynccontextmanager
async def _errors_to(context: Any) -> AsyncIterator[None]:
    try:
        yield
    except InfiniLoraError as error:
        context.set_trailing_metadata(((ERROR_KEY, msgspec.json.encode(error.to_wire())),))
        await context.abort(_STATUS_OF_HTTP[error.http_status], error.message)


def _call(context: Any) -> Call:
    return Call(context.peer(), dict(context.invocation_metadata() or ()), context.time_remaining)


def _trace_of(context: Any) -> Context:
    header = dict(context.invocation_metadata() or ()).get(telemetry.TRACEPARENT)
    return telemetry.from_traceparent(header if isinstance(header, str) else None)


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class _TokenGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Refuses every call, reflection included, that does not carry the token."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        given = dict(details.invocation_metadata or ()).get(AUTH_HEADER, "")
        if hmac.compare_digest(given.encode(), self._wanted):
            return await continuation(details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_request: bytes, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no token or a wrong one")


# Calling ---------------------------------------------------------------------------------------


class Channels:
    """One lazily opened, self-mending channel for each address. `async with`, or `close()` at the end."""

    def __init__(self, *, token: str = "") -> None:
        self._channels: dict[str, Any] = {}
        self._lent: Counter[str] = Counter()
        self._metadata: Metadata = ((AUTH_HEADER, f"Bearer {token}"),) if token else ()

    async def __aenter__(self) -> "Channels":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def client(self, service: ServiceDescriptor, address: str) -> "Client":
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=_CLIENT)
        return Client(service, self._channels[address], address, self._metadata)

    @asynccontextmanager
    async def lent(self, service: ServiceDescriptor, address: str) -> AsyncIterator["Client"]:
        """A client for the length of the block; with the last block of an address its channel is forgotten.

        For peers that come back elsewhere: their earlier addresses would be kept for ever.
        """
        self._lent[address] += 1
        try:
            yield self.client(service, address)
        finally:
            self._lent[address] -= 1
            if not self._lent[address]:
                del self._lent[address]
                await self.forget(address)

    async def forget(self, address: str) -> None:
        """Close the channel to a peer that will not come back under this address."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        for address in list(self._channels):
            await self.forget(address)


class Client:
    """Calls to one service at one address. Every failure is an `InfiniLoraError` leaf."""

    def __init__(self, service: ServiceDescriptor, channel: Any, address: str, metadata: Metadata) -> None:
        self._service = service
        self._channel = channel
        self._address = address
        self._metadata = metadata

    async def unary(self, rpc: str, request: Message, *, timeout_s: float) -> Message:
        call = self._open("unary_unary", rpc)(request, timeout=timeout_s, metadata=self._headers())
        async with self._errors(rpc):
            return await call

    async def stream(
        self, rpc: str, request: Message, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Message, None]:
        """The replies as they come. Leaving the loop early cancels the call: close it with `aclosing`."""
        call = self._open("unary_stream", rpc)(request, timeout=timeout_s, metadata=self._headers())
        try:
            async with self._errors(rpc):
                async for reply in call:
                    yield reply
        finally:
            call.cancel()

    @asynccontextmanager
    async def duplex(self, rpc: str, *, timeout_s: float | None = None) -> AsyncIterator["Duplex"]:
        """A stream in each direction, open for the length of the block."""
        call = self._open("stream_stream", rpc)(timeout=timeout_s, metadata=self._headers())
        try:
            yield Duplex(call, lambda: self._errors(rpc))
        finally:
            call.cancel()

    def _open(self, kind: str, rpc: str) -> Any:
        method = self._service.methods_by_name[rpc]
        return getattr(self._channel, kind)(
            f"/{self._service.full_name}/{rpc}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

    def _headers(self) -> Metadata:
        header = telemetry.traceparent()
        return (*self._metadata, (telemetry.TRACEPARENT, header)) if header else self._metadata

    @asynccontextmanager
    async def _errors(self, rpc: str) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise _leaf(error, f"{self._service.name}.{rpc} at {self._address}") from error
        except asyncio.CancelledError as error:
            # gRPC raises it also when the call was cancelled and the task was not: by another task of ours.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Unavailable(f"{self._service.name}.{rpc} at {self._address} was closed here") from error


class Duplex:
    """One open bidirectional call. One task sends, one iterates; the end of iteration is the peer's end."""

    def __init__(self, call: Any, errors: Callable[[], Any]) -> None:
        self._call = call
        self._errors = errors

    async def send(self, message: Message) -> None:
        async with self._errors():
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError as error:
                raise Unavailable("the stream has ended") from error

    async def finish(self) -> None:
        """Say that nothing more will be sent; replies may still come."""
        await self._call.done_writing()

    async def __aiter__(self) -> AsyncIterator[Message]:
        async with self._errors():
            async for message in self._call:
                yield message


def _leaf(error: Any, what: str) -> InfiniLoraError:
    carried = dict(error.trailing_metadata() or ()).get(ERROR_KEY)
    if isinstance(carried, bytes):
        return from_wire(msgspec.json.decode(carried, type=WireError))
    is_unheard = error.code() is grpc.StatusCode.INTERNAL and error.details() == _UNHEARD
    kind = Unreachable if is_unheard else _LEAF_OF_STATUS.get(error.code(), Internal)
    return kind(f"{what}: {error.code().name.lower()}: {error.details()}", retry_after_s=1.0)
