"""Control messages between processes: events, commands and durable facts, over NATS.

Connecting never fails for good. While the broker is away events are dropped and counted, requests raise
`Unavailable`, durable messages wait in memory; subscriptions and handlers come back by themselves. Nothing
here knows what a message means. `memory.MemoryBus` is the twin for tests; both pass one contract suite.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import msgspec
import nats.aio.client
import nats.errors
from nats.aio.msg import Msg

from infinilora.protocol.errors import InfiniLoraError, Internal, InvalidRequest, Unavailable, WireError, from_wire
from infinilora.runtime import telemetry
from infinilora.runtime.outbox import Outbox
from infinilora.runtime.subscription import Subscription
from infinilora.runtime.tasks import Tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)
Handler = Callable[[T], Awaitable[msgspec.Struct]]

CONNECT_S = 1.0
RETRY_S = 0.25
PING_S = 1
CLOSE_S = 2.0
ERROR_HEADER = "Infinilora-Error"


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
        self._outbox = Outbox()
        self.dropped_events = 0

    async def __aenter__(self) -> "NatsBus":
        await self._tasks.open()
        self._tasks.spawn(self._keep_connected())
        self._tasks.spawn(self._outbox.send(self._wait_client))
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if exc[0] is None and self._client is not None:
            try:
                await self.flush(CLOSE_S)
            except Unavailable as error:
                logger.warning(
                    "closing with messages unsent", extra={"durable": len(self._outbox), "error": str(error)}
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
        return decode_reply(reply.data, kind)

    async def serve(self, subject: str, kind: type[T], handler: Handler[T]) -> None:
        decoder = msgspec.json.Decoder(kind)

        async def deliver(message: Msg) -> None:
            self._tasks.spawn(self._answer(message, decoder, handler))

        task = self._add_route(deliver, _Route(subject, deliver))
        if task is not None:
            await task

    async def durable_publish(self, subject: str, event: msgspec.Struct) -> None:
        self._outbox.put(subject, encode(event))

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
                await self._outbox.wait_empty()

    # The connection

    async def _wait_client(self) -> nats.aio.client.Client:
        while self._client is None:
            await self._connected.wait()
        return self._client

    async def _keep_connected(self) -> None:
        last_error = ""
        while True:
            client = nats.aio.client.Client()
            gone = asyncio.Event()
            try:
                await self._connect(client, gone)
                last_error = ""
                await _until_gone(client, gone)
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

    # Handlers

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


def decode_reply(payload: bytes, kind: type[R]) -> R:
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise Internal(f"the peer's reply is not a {kind.__name__}: {error}") from error


@contextmanager
def _in_time(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise Unavailable(f"the broker did not answer within {timeout_s} s", retry_after_s=1.0) from error


def _trace_headers() -> dict[str, str] | None:
    header = telemetry.traceparent()
    return {telemetry.TRACEPARENT: header} if header else None


async def _until_gone(client: nats.aio.client.Client, gone: asyncio.Event) -> None:
    """Until it closes: it says so only when its last bytes are out, and a broker that hangs takes none."""
    while not gone.is_set() and not client.is_closed:
        with suppress(TimeoutError):
            async with asyncio.timeout(PING_S):
                await gone.wait()


async def _close(client: nats.aio.client.Client) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):  # what it has still to send, a broker that hangs does not take
            await client.close()
    except (nats.errors.Error, OSError, TimeoutError) as error:
        logger.debug("nats", extra={"error": str(error)})
