"""Durable messages on their way to the broker's disk (JetStream): in order, each acknowledged before the next.

They wait in this process while the broker is away, at most `DURABLE_LIMIT` of them. One that is larger than the broker
takes is lost, and said: nothing else is.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from uuid import uuid4

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from infinilora.protocol import subjects
from infinilora.protocol.errors import Unavailable

logger = logging.getLogger(__name__)

DURABLE_LIMIT = 10_000
ACK_S = 1.0
RETRY_S = 0.25
STREAMS = {subjects.USAGE_STREAM: (subjects.USAGE,)}
STREAM_AGE_S = 30 * 86_400
STREAM_MESSAGES = 10_000_000
"""Whoever bills reads the stream within a month; a disk that nobody reads from does not fill."""


class _Durable(msgspec.Struct, frozen=True):
    subject: str
    payload: bytes
    message_id: str
    """Lets the broker recognise a message that is sent again because its acknowledgement was lost."""


class Outbox:
    """What was promised and is not on disk yet."""

    def __init__(self) -> None:
        self._waiting: deque[_Durable] = deque()
        self._has_some = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, subject: str, payload: bytes) -> None:
        if len(self._waiting) >= DURABLE_LIMIT:
            raise Unavailable(f"{DURABLE_LIMIT} durable messages wait for the broker already", retry_after_s=5.0)
        self._waiting.append(_Durable(subject, payload, uuid4().hex))
        self._is_empty.clear()
        self._has_some.set()

    async def wait_empty(self) -> None:
        await self._is_empty.wait()

    async def send(self, connected: Callable[[], Awaitable[Client]]) -> None:
        """Send what comes, for ever; `connected` waits for the broker."""
        last_error = ""
        while True:
            await self._has_some.wait()
            try:
                await self._send_first(await connected())
                last_error = ""
            except (nats.errors.Error, OSError, TimeoutError) as error:
                if repr(error) != last_error:
                    last_error = repr(error)
                    logger.warning("durable message not taken", extra={"error": last_error})
                await asyncio.sleep(RETRY_S)
            if not self._waiting:
                self._has_some.clear()
                self._is_empty.set()

    async def _send_first(self, client: Client) -> None:
        first = self._waiting[0]
        stream = client.jetstream(timeout=ACK_S)
        try:
            await stream.publish(first.subject, first.payload, headers={"Nats-Msg-Id": first.message_id})
        except nats.js.errors.NoStreamResponseError:
            for name, covered in STREAMS.items():
                await stream.add_stream(
                    name=name, subjects=list(covered), max_age=STREAM_AGE_S, max_msgs=STREAM_MESSAGES
                )
            return  # the first is still the first
        except nats.errors.MaxPayloadError:
            # No broker of this limit ever takes it, and those behind it would wait for ever.
            size = {"subject": first.subject, "num_bytes": len(first.payload)}
            logger.error("durable message lost: too large for the broker", extra=size)  # noqa: TRY400 - no traceback
        self._waiting.popleft()
