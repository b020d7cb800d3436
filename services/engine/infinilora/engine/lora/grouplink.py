"""One link to one LoRA server group: its opening, its control stream, its end. Runs on the asyncio loop.

    Hello (offers) -> Welcome (chosen, secret) -> attach -> Ready
    then: LeaseRequest, LeaseRelease ->    <- LeaseGranted, ColumnScale, LayersReady, LeaseFailed

The stream's end is the link's death, and the other way round: whoever notices first tells the other.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from infinilora.engine.lora.interface import COMPUTED_SITES
from infinilora.link.ends import EngineEnd
from infinilora.link.errors import LinkClosed
from infinilora.link.open import LinkSettings, Offers, attach
from infinilora.protocol import lora_pb2
from infinilora.protocol.adapter import DTYPE_BYTES
from infinilora.protocol.errors import InfiniLoraError, InvalidRequest, Unavailable
from infinilora.protocol.ids import PROTOCOL_VERSION, Fingerprint
from infinilora.runtime.rpc import Channels, Duplex, Message

logger = logging.getLogger(__name__)

SERVICE = lora_pb2.DESCRIPTOR.services_by_name["LoraServer"]
OPEN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What an engine says of itself in every Hello. `dtype` of activations: F32, BF16 or F16."""

    engine_id: str
    incarnation: str
    base: Fingerprint
    dtype: str
    max_rows: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidRequest(f"activation dtype {self.dtype!r}; wanted one of {', '.join(DTYPE_BYTES)}")

    def hello(self, offers: Offers) -> Message:
        wire = [
            lora_pb2.Offer(backend=offer["backend"], details={k: v for k, v in offer.items() if k != "backend"})
            for offer in offers.wire
        ]
        return lora_pb2.EngineMessage(
            hello=lora_pb2.Hello(
                protocol_version=PROTOCOL_VERSION,
                engine_id=self.engine_id,
                incarnation=self.incarnation,
                base_fingerprint=self.base,
                dtype=self.dtype,
                max_rows=self.max_rows,
                offers=wire,
                sites=COMPUTED_SITES,
                scales_columns=True,
            )
        )


class GroupLink:
    """An open link. `end` is the step thread's; `send` the loop's; `die` anybody's.

    Once dead it stays so: a group that comes back gets another GroupLink.
    """

    def __init__(
        self, group: str, backend: str, end: EngineEnd, stream: Duplex, messages: AsyncIterator[object]
    ) -> None:
        self.group = group
        self.backend = backend
        self.end = end
        self.reason = "the LoRA server ended the stream"
        self._stream = stream
        self._messages = messages
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._died = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        return self.end.is_alive

    def send(self, message: Message) -> None:
        self._outbox.put_nowait(message)

    def die(self, reason: str) -> None:
        """End the link, wake a waiting step, end the stream."""
        self.reason = reason
        self.end.close()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._died.set)

    async def run(self, take: Callable[[Message], None]) -> None:
        """Send what is to be sent and `take` what the group says, until the link ends; `reason` says why then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_all())
                tasks.create_task(self._until_dead())
                async for message in self._messages:
                    take(message)
                raise LinkClosed(self.reason)
        except* InfiniLoraError as ends:
            self.reason = str(ends.exceptions[0])
        # A TaskGroup loses a cancellation that comes while it raises; the task still knows of it.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError

    async def _send_all(self) -> None:
        while True:
            await self._stream.send(await self._outbox.get())

    async def _until_dead(self) -> None:
        await self._died.wait()
        raise LinkClosed(self.reason)


@asynccontextmanager
async def open_link(
    channels: Channels, group: str, address: str, identity: Identity, settings: LinkSettings
) -> AsyncIterator[GroupLink]:
    """Open a link to the group at `address`; it is dead when the block ends. Raises InfiniLoraError leaves."""
    offers = Offers(settings)
    try:
        async with channels.client(SERVICE, address).duplex("OpenLink") as stream:
            messages = aiter(stream)
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await stream.send(identity.hello(offers))
                welcome = _welcome(await anext(messages, None), group)
                chosen = {**welcome.chosen.details, "backend": welcome.chosen.backend}
                end = await asyncio.to_thread(attach, chosen, welcome.secret, settings)
                await stream.send(lora_pb2.EngineMessage(ready=lora_pb2.Ready()))
            link = GroupLink(group, welcome.chosen.backend, end, stream, messages)
            logger.info("link opened", extra={"group": group, "backend": link.backend, "address": address})
            try:
                yield link
            finally:
                link.die(link.reason)
    except TimeoutError as error:
        raise Unavailable(f"group {group} at {address} did not open a link within {OPEN_TIMEOUT_S:.0f} s") from error
    finally:
        offers.close()


def _welcome(message: Message | None, group: str) -> Message:
    if message is None or message.WhichOneof("message") != "welcome":
        raise Unavailable(f"group {group} ended the stream instead of a welcome")
    version = message.welcome.protocol_version
    if version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        raise InvalidRequest(f"group {group} speaks protocol version {version}; this engine {PROTOCOL_VERSION}")
    return message.welcome
