"""HTTP answers that end with their client: a cancellable call, and a stream of server-sent events.

A stream's status and headers are not sent before its first event, so whatever fails until then is an
ordinary error answer. What fails later is said in an error event, and the stream then ends without `[DONE]`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from infinilora.gateway.relay import first_error
from infinilora.protocol.errors import InfiniLoraError
from infinilora.runtime.problems import error_body, error_response

T = TypeVar("T")


class Write(Protocol):
    """Sends the JSON of some events at once. `headers` are added to the response's if these are its first."""

    async def __call__(self, events: Sequence[Any], *, headers: Mapping[str, str] = ...) -> None: ...


NOTHING: Mapping[str, str] = MappingProxyType({})


class ClientGone(Exception):
    """The client closed its connection; what it asked for has been cancelled."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; cancel it, and raise ClientGone, when the client goes away first."""
    leash = asyncio.timeout(None)
    try:
        async with asyncio.TaskGroup() as group, leash:
            watcher = group.create_task(_watch(receive, leash))
            try:
                return await work
            finally:
                watcher.cancel()
    except BaseExceptionGroup as errors:
        error = first_error(errors)
        raise (ClientGone() if leash.expired() else error) from None


async def _watch(receive: Receive, leash: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leash.reschedule(asyncio.get_running_loop().time())


class EventStream(Response):
    """An answer of server-sent events, written by `produce`.

    `produce` gets a function that sends events; when it returns, `[DONE]` follows. It is cancelled when the
    client goes away.
    """

    def __init__(self, produce: Callable[[Write], Awaitable[None]], *, headers: dict[str, str]) -> None:
        super().__init__(None, headers=headers)
        self._produce = produce
        self._error_headers = headers

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _Events(send, self._error_headers)
        try:
            await while_connected(receive, self._produce(out.write))
        except ClientGone:
            return
        except InfiniLoraError as error:
            if not out.is_open:
                await error_response(error, self._error_headers)(scope, receive, send)
                return
            await out.write([error_body(error)])
            await out.close(b"")
            return
        await out.close(b"data: [DONE]\n\n")


class _Events:
    """Writes events to one client; opens the response with the first."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = headers
        self.is_open = False

    async def write(self, events: Sequence[Any], *, headers: Mapping[str, str] = NOTHING) -> None:
        if not self.is_open:
            self.is_open = True
            await self._start(headers)
        data = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        await self._body(data, more=True)

    async def close(self, last: bytes) -> None:
        if not self.is_open:
            self.is_open = True
            await self._start(NOTHING)
        await self._body(last, more=False)

    async def _start(self, more: Mapping[str, str]) -> None:
        headers = {
            **self._headers,
            **more,
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
