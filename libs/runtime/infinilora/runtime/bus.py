"""Control messages between processes: events, commands and durable facts, over NATS.

Connecting never fails for good. While the broker is away events are dropped and counted, requests raise
`Unavailable`, durable messages wait in memory; subscriptions and handlers come back by themselves. Nothing
here knows what a message means. `memory.MemoryBus` is the twin for tests; both pass one contract suite.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

import msgspec
import nats.aio.client
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from infinilora.protocol import subjects
from infinilora.protocol.errors import InfiniLoraError, InvalidRequest, Unavailable, WireError, from_wire
from infinilora.runtime import telemetry
from infinilora.runtime.tasks import Tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)
Handler = Callable[[T], Awaitable[msgspec.Struct]]

INBOX_LIMIT = 10_000
"""Events that a slow reader may leave unread; past it the oldest go, counted."""
DURABLE_LIMIT = 10_000
"""Durable messages kept while the broker is away."""
CONNECT_S = 1.0
RETRY_S = 0.25
PING_S = 1
CLOSE_S = 2.0
ERROR_HEADER = "Infinilora-Error"
STREAMS = {subjects.USAGE_STREAM: (subjects.USAGE,)}
STREAM_AGE_S = 30 * 86_400
STREAM_MESSAGES = 10_000_000
"""Whoever bills reads the stream within a month; a disk that nobody reads from does not fill."""


class Subscription(Generic[T]):
    """Events of one subject (or pattern) as they come; ends when it, or its bus, is closed."""

    def __init__(self, subject: str, kind: type[T], on_close: Callable[["Subscription[T]"], None]) -> None:
        self.subject = subject
        self.dropped = 0
        self._decoder = msgspec.json.Decoder(kind)
        self._events: deque[T] = deque()
        self._arrived = asyncio.Event()
        self._is_closed = False
        self._on_close = on_close

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._events:
            if self._is_closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    def pop_all(self) -> list[T]:
        """What has come and was not read yet, without waiting."""
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._arrived.set()
            self._on_close(self)

    def push(self, payload: bytes) -> None:
        """For the bus: an event has come. One that does not parse, or has no room, is dropped and counted."""
        try:
            event = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            self.dropped += 1
            logger.warning("event does not parse", extra={"subject": self.subject, "error": str(error)})
            return
        if len(self._events) >= INBOX_LIMIT:
            self._events.popleft()
            self.dropped += 1
        self._events.append(event)
        self._arrived.set()


class Bus(Protocol):
    """The control plane as a process sees it. Used inside `async with`."""

    dropped_events: int

    @property
    def is_connected(self) -> bool: ...
    def on_state(self, callback: Callable[[bool], None]) -> None:
        """Call back with True when the broker is there and False when it goes; at once with the present."""
        ...

    async def publish(self, subject: str, event: msgspec.Struct) -> None:
        """An event: sent if the broker is there, else dropped and counted."""
        ...

    def subscribe(self, subject: str, kind: type[T]) -> Subscription[T]: ...
    async def request(self, subject: str, message: msgspec.Struct, kind: type[R], *, timeout_s: float) -> R:
        """Ask one peer. Raises what its handler raised, or `Unavailable` when no answer came in time."""
        ...

    async def serve(self, subject: str, kind: type[T], handler: Handler[T]) -> None:
        """Answer requests until the bus closes; each in a task of its own."""
        ...

    async def durable_publish(self, subject: str, event: msgspec.Struct) -> None:
        """A fact that must not be lost: kept in this process until the broker has it on disk.

        Returns at once. Raises `Unavailable` when the bounded buffer is full: then it was not taken.
        """
        ...

    async def ping(self, timeout_s: float = 1.0) -> None:
        """Wait until the broker has seen all that was said and subscribed; a proof that it is there."""
        ...

    async def flush(self, timeout_s: float = 1.0) -> None:
        """As `ping`, and until it has every durable message on disk."""
        ...


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message)


class _Durable(msgspec.Struct, frozen=True):
    subject: str
    payload: bytes
    message_id: str
    """Lets the broker recognise a message that is sent again because its acknowledgement was lost."""


class NatsBus:
    """The bus over a NATS server. Owns its connection and the tasks of its handlers.

    Each connection is a new client and every subscription is made again on it, so that a first connection,
    a lost one and a refused one are the same case.
    """

    def __init__(self, url: str, *, name: str = "infinilora") -> None:
        self._url = url
        self._name = name
        self._client: nats.aio.client.Client | None = None
        self._connected = asyncio.Event()
        self._tasks = Tasks()
        self._routes: dict[object, _Route] = {}
        self._making: set[asyncio.Task[None]] = set()
        self._watchers: list[Callable[[bool], None]] = []
        self._durable: deque[_Durable] = deque()
        self._durable_waits = asyncio.Event()
        self._durable_done = asyncio.Event()
        self._durable_done.set()
        self.dropped_events = 0

    async def __aenter__(self) -> "NatsBus":
        await self._tasks.open()
        self._tasks.spawn(self._keep_connected())
        self._tasks.spawn(self._send_durable())
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if exc[0] is None and self._client is not None:
            try:
                await self.flush(CLOSE_S)
            except Unavailable as error:
                logger.warning(
                    "closing with messages unsent", extra={"durable": len(self._durable), "error": str(error)}
                )
        routes, self._routes = self._routes, {}
        for key in routes:
            if isinstance(key, Subscription):
                key.close()
        await self._tasks.close(*exc)

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    async def wait_connected(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError:
            return False
        return True

    def on_state(self, callback: Callable[[bool], None]) -> None:
        self._watchers.append(callback)
        callback(self.is_connected)

    async def publish(self, subject: str, event: msgspec.Struct) -> None:
        client = self._client
        if client is None:
            self.dropped_events += 1
            return
        await self._settle()
        try:
            await client.publish(subject, encode(event), headers=_trace_headers())
        except (nats.errors.Error, OSError):
            self.dropped_events += 1

    def subscribe(self, subject: str, kind: type[T]) -> Subscription[T]:
        subscription: Subscription[T] = Subscription(subject, kind, self._forget)

        async def deliver(message: Msg) -> None:
            subscription.push(message.data)

        self._add_route(subscription, _Route(subject, deliver))
        return subscription

    async def request(self, subject: str, message: msgspec.Struct, kind: type[R], *, timeout_s: float) -> R:
        client = self._client
        if client is None:
            raise Unavailable("the broker is away", retry_after_s=1.0)
        await self._settle()
        try:
            reply = await client.request(subject, encode(message), timeout=timeout_s, headers=_trace_headers())
        except nats.errors.NoRespondersError as error:
            raise Unavailable(f"nobody answers on {subject}", retry_after_s=1.0) from error
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise Unavailable(f"no answer on {subject} within {timeout_s} s", retry_after_s=1.0) from error
        if reply.headers and ERROR_HEADER in reply.headers:
            raise from_wire(msgspec.json.decode(reply.data, type=WireError))
        return msgspec.json.decode(reply.data, type=kind)

    async def serve(self, subject: str, kind: type[T], handler: Handler[T]) -> None:
        decoder = msgspec.json.Decoder(kind)

        async def deliver(message: Msg) -> None:
            self._tasks.spawn(self._answer(message, decoder, handler))

        task = self._add_route(deliver, _Route(subject, deliver))
        if task is not None:
            await task

    async def durable_publish(self, subject: str, event: msgspec.Struct) -> None:
        if len(self._durable) >= DURABLE_LIMIT:
            raise Unavailable(f"{DURABLE_LIMIT} durable messages wait for the broker already", retry_after_s=5.0)
        self._durable.append(_Durable(subject, encode(event), uuid4().hex))
        self._durable_done.clear()
        self._durable_waits.set()

    async def ping(self, timeout_s: float = 1.0) -> None:
        client = self._client
        if client is None:
            raise Unavailable("the broker is away", retry_after_s=1.0)
        with _in_time(timeout_s):
            async with asyncio.timeout(timeout_s):
                await self._settle()
                await client.flush(max(1, int(timeout_s)))

    async def flush(self, timeout_s: float = 1.0) -> None:
        await self.ping(timeout_s)
        with _in_time(timeout_s):
            async with asyncio.timeout(timeout_s):
                await self._durable_done.wait()

    # The connection

    async def _keep_connected(self) -> None:
        last_error = ""
        while True:
            client = nats.aio.client.Client()
            gone = asyncio.Event()
            try:
                await self._connect(client, gone)
                last_error = ""
                await gone.wait()
            except (nats.errors.Error, OSError, TimeoutError) as error:
                # The same refusal four times a second is one fact.
                if repr(error) != last_error:
                    last_error = repr(error)
                    logger.warning("broker is away", extra={"error": last_error})
            finally:
                self._set_client(None)
                await _close(client)
            await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))  # noqa: S311 - spreads reconnects

    async def _connect(self, client: nats.aio.client.Client, gone: asyncio.Event) -> None:
        async def on_closed() -> None:
            gone.set()

        async def on_error(error: Exception) -> None:
            logger.debug("nats", extra={"error": str(error)})

        await client.connect(
            self._url,
            name=self._name,
            allow_reconnect=False,
            connect_timeout=CONNECT_S,
            max_reconnect_attempts=1,
            reconnect_time_wait=RETRY_S,
            ping_interval=PING_S,
            max_outstanding_pings=2,
            closed_cb=on_closed,
            disconnected_cb=on_closed,
            error_cb=on_error,
        )
        await client.flush()
        # No await between the last look and `_set_client`: whoever subscribes after it finds the client.
        while unmade := [route for route in self._routes.values() if route.client is not client]:
            for route in unmade:
                await route.make(client)
        self._set_client(client)

    def _set_client(self, client: nats.aio.client.Client | None) -> None:
        if (client is None) == (self._client is None):
            return
        self._client = client
        (self._connected.set if client else self._connected.clear)()
        logger.info("broker connected" if client else "broker lost")
        for watcher in self._watchers:
            watcher(client is not None)

    def _add_route(self, key: object, route: "_Route") -> asyncio.Task[None] | None:
        self._routes[key] = route
        if self._client is None:
            return None
        route.making = self._tasks.spawn(self._make(route, self._client))
        if route.making is not None:
            self._making.add(route.making)
            route.making.add_done_callback(self._making.discard)
        return route.making

    async def _settle(self) -> None:
        """What was subscribed before is in force before what is said now."""
        if self._making:
            await asyncio.wait(self._making)

    async def _make(self, route: "_Route", client: nats.aio.client.Client) -> None:
        try:
            await route.make(client)
        except (nats.errors.Error, OSError):
            return  # the connection is going; every route is made again on the next one

    def _forget(self, subscription: Subscription[Any]) -> None:
        route = self._routes.pop(subscription, None)
        if route is not None and self._client is not None:
            self._tasks.spawn(route.unmake())

    # Handlers and durable messages

    async def _answer(self, message: Msg, decoder: msgspec.json.Decoder[T], handler: Handler[T]) -> None:
        headers = message.headers or {}
        with telemetry.attached(telemetry.from_traceparent(headers.get(telemetry.TRACEPARENT))):
            reply, reply_headers = await answer(message.data, decoder, handler)
        client = self._client
        if client is not None and message.reply:
            try:
                await client.publish(message.reply, reply, headers=reply_headers)
            except (nats.errors.Error, OSError):
                logger.info("reply lost", extra={"subject": message.subject})

    async def _send_durable(self) -> None:
        last_error = ""
        while True:
            await self._durable_waits.wait()
            await self._connected.wait()
            try:
                await self._send_first_durable()
                last_error = ""
            except (nats.errors.Error, OSError, TimeoutError) as error:
                if repr(error) != last_error:
                    last_error = repr(error)
                    logger.warning("durable message not taken", extra={"error": last_error})
                await asyncio.sleep(RETRY_S)
            if not self._durable:
                self._durable_waits.clear()
                self._durable_done.set()

    async def _send_first_durable(self) -> None:
        client = self._client
        if client is None:
            return
        stream = client.jetstream(timeout=CONNECT_S)
        first = self._durable[0]
        headers = {"Nats-Msg-Id": first.message_id}
        try:
            await stream.publish(first.subject, first.payload, headers=headers)
        except nats.js.errors.NoStreamResponseError:
            for name, covered in STREAMS.items():
                await stream.add_stream(
                    name=name, subjects=list(covered), max_age=STREAM_AGE_S, max_msgs=STREAM_MESSAGES
                )
            return
        self._durable.popleft()


class _Route:
    """A subject and its callback, and the client on which it is subscribed now."""

    def __init__(self, subject: str, deliver: Callable[[Msg], Awaitable[None]]) -> None:
        self.subject = subject
        self.client: nats.aio.client.Client | None = None
        self.making: asyncio.Task[None] | None = None
        self._deliver = deliver
        self._made: Any = None

    async def make(self, client: nats.aio.client.Client) -> None:
        self.client = client
        self._made = await client.subscribe(self.subject, cb=self._deliver)

    async def unmake(self) -> None:
        if self.making is not None:
            await self.making
        try:
            if self._made is not None:
                await self._made.unsubscribe()
        except nats.errors.Error:
            return  # the connection it was made on is gone, and the subscription with it


async def answer(
    payload: bytes, decoder: msgspec.json.Decoder[T], handler: Handler[T]
) -> tuple[bytes, dict[str, str] | None]:
    """Run a handler on a request's bytes; the reply's bytes, and headers that mark it when it is an error."""
    try:
        request = decoder.decode(payload)
        return encode(await handler(request)), None
    except msgspec.MsgspecError as error:
        return encode(InvalidRequest(f"message does not parse: {error}").to_wire()), {ERROR_HEADER: "1"}
    except InfiniLoraError as error:
        return encode(error.to_wire()), {ERROR_HEADER: "1"}


@contextmanager
def _in_time(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise Unavailable(f"the broker did not answer within {timeout_s} s", retry_after_s=1.0) from error


def _trace_headers() -> dict[str, str] | None:
    header = telemetry.traceparent()
    return {telemetry.TRACEPARENT: header} if header else None


async def _close(client: nats.aio.client.Client) -> None:
    try:
        await client.close()
    except (nats.errors.Error, OSError, TimeoutError) as error:
        logger.debug("nats", extra={"error": str(error)})
