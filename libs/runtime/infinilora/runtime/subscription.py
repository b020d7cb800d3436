"""Events of one subject as a process reads them. Knows no broker: whoever has the bytes pushes them."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)

T = TypeVar("T")

INBOX_LIMIT = 10_000
"""Events that a slow reader may leave unread; past it the oldest go, counted."""


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
