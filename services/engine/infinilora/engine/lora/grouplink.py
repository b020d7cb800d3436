"""One link to one LoRA server group, to each of its shards: opening, control stream, end. Runs on the asyncio loop.

    Hello (offers) -> Welcome (chosen, secret) -> attach -> Ready      rdma: Ready -> both ends show their cards
    then: LeaseRequest, LeaseRelease ->    <- LeaseGranted, ColumnScale, LayersReady, LeaseFailed

The stream's end is the link's death, and the other way round: whoever notices first tells the other. The Welcome of a
group of several shards says where the others are: each gets a Hello, a stream and rings of its own, and no leases. They
are one link: what ends one ends all.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from infinilora.engine.lora.interface import COMPUTED_SITES
from infinilora.link.engine_end import EngineEnd
from infinilora.link.errors import LinkClosed, LinkNotOpened
from infinilora.link.open import LinkSettings, Offers, attach
from infinilora.protocol import lora_pb2
from infinilora.protocol.adapter import DTYPE_BYTES, BaseCard
from infinilora.protocol.errors import InfiniLoraError, Internal, InvalidRequest, Unavailable
from infinilora.protocol.ids import PROTOCOL_VERSION, Fingerprint
from infinilora.protocol.shards import HEAD, ONE, Shape, Sharding
from infinilora.runtime.rpc import Channels, Duplex, Message

logger = logging.getLogger(__name__)

SERVICE = lora_pb2.DESCRIPTOR.services_by_name["LoraServer"]
OPEN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What an engine says of itself in every Hello. `dtype` of activations: F32, BF16 or F16.

    `least_buffer_bytes`, which it does not say: of a link's buffers, so that one row of any site fits (widest.py).
    """

    engine_id: str
    incarnation: str
    base: Fingerprint
    dtype: str
    max_rows: int
    least_buffer_bytes: int = 0

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
                opens_shards=True,
            )
        )


@dataclass(frozen=True, slots=True)
class ShardLink:
    """Rings and stream to one shard."""

    address: str
    welcome: Message
    end: EngineEnd
    stream: Duplex
    messages: AsyncIterator[object]


class GroupLink:
    """An open link. `ends` are the step thread's; `send` the loop's; `die` anybody's.

    Once dead it stays so: a group that comes back gets another GroupLink. `sharding` is None for a group that is one
    process; else it says whose each site is, and `ends[n]` leads to shard n.
    """

    def __init__(self, group: str, shards: Sequence[ShardLink], sharding: Sharding | None) -> None:
        head, *self._others = shards
        self.group = group
        self.backend: str = head.welcome.chosen.backend
        self.ends = tuple(shard.end for shard in shards)
        self.sharding = sharding
        self.reason = "the LoRA server ended the stream"
        self._stream = head.stream
        self._messages = head.messages
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._died = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        return all(end.is_alive for end in self.ends)

    @property
    def narrows(self) -> bool:
        """Whether rows may travel as eight-bit integers."""
        return any(end.narrowing != "never" for end in self.ends)

    def owner(self, layer: int, site: int) -> int | None:
        """The shard that computes a site alone; None where several columns do."""
        return HEAD if self.sharding is None else self.sharding.one_owner(layer, site)

    def send(self, message: Message) -> None:
        self._outbox.put_nowait(message)

    def die(self, reason: str) -> None:
        """End the link, wake a waiting step, end the stream."""
        self.reason = reason
        for end in self.ends:
            end.close()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._died.set)

    async def run(self, take: Callable[[Message], None]) -> None:
        """Send what is to be sent and `take` what the group says, until the link ends; `reason` says why then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_all())
                tasks.create_task(self._until_dead())
                for shard in self._others:
                    tasks.create_task(self._until_ended(shard))
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

    async def _until_ended(self, shard: ShardLink) -> None:
        """Another shard than the head says nothing: its stream is there to end."""
        async for message in shard.messages:
            raise Internal(f"a shard of group {self.group} at {shard.address} sent {message!r} after its welcome")
        raise LinkClosed(f"the shard of group {self.group} at {shard.address} ended the stream")

    async def _until_dead(self) -> None:
        await self._died.wait()
        raise LinkClosed(self.reason)


@asynccontextmanager
async def open_link(
    channels: Channels, group: str, address: str, identity: Identity, settings: LinkSettings, *, card: BaseCard
) -> AsyncIterator[GroupLink]:
    """Open a link to the group whose head is at `address`, of the base of `card`; it is dead when the block ends.

    Raises InfiniLoraError leaves.
    """
    async with AsyncExitStack() as stack:
        head = await stack.enter_async_context(_open_shard(channels, group, address, identity, settings))
        shards, sharding = [head], _sharding(head.welcome, card)
        for number, where in enumerate(head.welcome.shards, HEAD + 1):
            opening = _open_shard(channels, group, where.address, identity, settings)
            shards.append(await stack.enter_async_context(opening))
            found = shards[-1].welcome.incarnation
            if found != where.incarnation:
                raise Unavailable(
                    f"shard {number} of group {group} at {where.address} is of incarnation {found}; "
                    f"its head knows {where.incarnation}"
                )
        link = GroupLink(group, shards, sharding)
        extra = {"group": group, "backend": link.backend, "address": address, "shards": len(shards)}
        if signal := head.welcome.chosen.details.get("signal"):
            extra["signal"] = signal  # `host`: two processes take turns on one GPU, and each call waits for both
        logger.info("link opened", extra=extra)
        try:
            yield link
        finally:
            link.die(link.reason)


def _sharding(welcome: Message, card: BaseCard) -> Sharding | None:
    """Who owns what in a group of several shards; None in one that is a single process."""
    shape = Shape.parse(welcome.shape) if welcome.shape else ONE
    if len(welcome.shards) != shape.num_shards - 1:
        found = f"{len(welcome.shards)} shards beside it for a group of shape {shape}"
        raise InvalidRequest(f"group {welcome.group}: its head names {found}; wanted {shape.num_shards - 1}")
    return Sharding(shape, card.num_layers, card.sites) if shape.num_shards > 1 else None


@asynccontextmanager
async def _open_shard(
    channels: Channels, group: str, address: str, identity: Identity, settings: LinkSettings
) -> AsyncIterator[ShardLink]:
    """Rings and a stream to one process, closed when the block ends. LinkNotOpened once the server has chosen."""
    offers, backend = Offers(settings), ""
    try:
        async with channels.lent(SERVICE, address) as client, client.duplex("OpenLink") as stream:
            messages = aiter(stream)
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await stream.send(identity.hello(offers))
                welcome = _welcome(await anext(messages, None), group)
                backend = welcome.chosen.backend
                end = await _attached(stream, welcome, settings)
            try:
                _check_buffers(end, group, identity)
                yield ShardLink(address, welcome, end, stream, messages)
            finally:
                end.close()
    except TimeoutError as error:
        message = f"group {group} at {address} did not open a link within {OPEN_TIMEOUT_S:.0f} s"
        raise (LinkNotOpened(backend, message) if backend else Unavailable(message)) from error
    finally:
        offers.close()


def _check_buffers(end: EngineEnd, group: str, identity: Identity) -> None:
    """The server says how large they are. A row that fits none would be found out in the middle of a step."""
    found, wanted = end.buffer_bytes, identity.least_buffer_bytes
    if found < wanted:
        raise InvalidRequest(
            f"buffers of links to group {group} hold {found} bytes, and one row of this base's widest site takes "
            f"{wanted}; wanted an INFINILORA_LINK_BUFFER_BYTES of at least that at the group's LoRA servers"
        )


async def _attached(stream: Duplex, welcome: Message, settings: LinkSettings) -> EngineEnd:
    """Our end of what the server chose, and `Ready` said. A server makes its end when it hears that.

    So it is said first where each end waits for the other's card, and last where a ring's file is given up by it.
    """
    backend, ready = welcome.chosen.backend, lora_pb2.EngineMessage(ready=lora_pb2.Ready())
    if backend == "rdma":
        await stream.send(ready)
    try:
        end = await asyncio.to_thread(attach, {**welcome.chosen.details, "backend": backend}, welcome.secret, settings)
    except (InfiniLoraError, OSError) as error:
        raise LinkNotOpened(backend, f"the {backend} link was not opened: {error}") from error
    if backend != "rdma":
        try:
            await stream.send(ready)
        except BaseException:
            end.close()
            raise
    return end


def _welcome(message: Message | None, group: str) -> Message:
    if message is None or message.WhichOneof("message") != "welcome":
        raise Unavailable(f"group {group} ended the stream instead of a welcome")
    version = message.welcome.protocol_version
    if version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        raise InvalidRequest(f"group {group} speaks protocol version {version}; this engine {PROTOCOL_VERSION}")
    return message.welcome
