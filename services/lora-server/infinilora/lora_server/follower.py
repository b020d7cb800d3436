"""A shard's side of its group: it follows the head's orders until their stream ends, and ends then itself.

It tries to reach the head for as long as that is away. Once it has been there, its end is this process's end: what is
here was of that life of the group, and the next one begins empty.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

from infinilora.lora_server.shards import SHARDS, GroupFacts, read_order
from infinilora.pool.follower import FollowerPool
from infinilora.pool.scales import SiteScale
from infinilora.protocol import lora_pb2
from infinilora.protocol.errors import DeadlineExceeded, InfiniLoraError, Overloaded, Unavailable
from infinilora.protocol.ids import PROTOCOL_VERSION
from infinilora.runtime.rpc import Channels, Duplex
from infinilora.runtime.service import Service

logger = logging.getLogger(__name__)

WELCOME_S = 5.0
RETRY_S = 0.2

Message = lora_pb2.FollowerMessage


class ToHead:
    """What is to be said to the head, in order; from any thread. The `FollowerListener` of the pool."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Message] = asyncio.Queue()

    def ready(self, slot: int, slot_generation: int, count: int, *, scales: Sequence[SiteScale], tier: str) -> None:
        wire = [
            lora_pb2.ColumnScale(
                layer=scale.layer, site=scale.site, factors=scale.factors.numpy().astype("<f4", copy=False).tobytes()
            )
            for scale in scales
        ]
        news = lora_pb2.ShardReady(slot=slot, slot_generation=slot_generation, count=count, tier=tier, scales=wire)
        self._put(Message(ready=news))

    def failed(self, slot: int, slot_generation: int, error: InfiniLoraError) -> None:
        lost = lora_pb2.ShardFailed(slot=slot, slot_generation=slot_generation, code=error.code, message=error.message)
        self._put(Message(failed=lost))

    def emptied(self, slot: int, slot_generation: int) -> None:
        self._put(Message(emptied=lora_pb2.ShardEmptied(slot=slot, slot_generation=slot_generation)))

    def leaves(self) -> None:
        """This process was asked to stop."""
        self._put(Message(leaves=lora_pb2.ShardLeaves()))

    async def next(self) -> Message:
        return await self._queue.get()

    def _put(self, message: Message) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, message)


class Following:
    """This shard's membership of its group: `run` is its whole life."""

    def __init__(
        self,
        facts: GroupFacts,
        shard: int,
        where: lora_pb2.Shard,
        *,
        head: str,
        pool: FollowerPool,
        to_head: ToHead,
        service: Service,
    ) -> None:
        self._facts = facts
        self._shard = shard
        self._where = where
        self._head = head
        self._pool = pool
        self._to_head = to_head
        self._service = service

    async def run(self, channels: Channels) -> None:
        """Follow until the head ends the stream. Raises Unavailable unless this process was asked to stop."""
        has_said = False
        while not self._service.draining.is_set():
            try:
                async with channels.client(SHARDS, self._head).duplex("Follow") as stream:
                    messages = aiter(stream)
                    await self._join(stream, messages)
                    await self._obey(stream, messages)
            except (Unavailable, DeadlineExceeded, Overloaded) as error:
                if self._service.is_ready:
                    raise Unavailable(f"this life of group {self._facts.group} is over: {error.message}") from error
                if not has_said:
                    logger.info("waiting for the head", extra={"address": self._head, "reason": error.message})
                    has_said = True
            await asyncio.sleep(RETRY_S)

    async def _join(self, stream: Duplex, messages: AsyncIterator[lora_pb2.HeadMessage]) -> None:
        facts = self._facts
        follow = lora_pb2.Follow(
            protocol_version=PROTOCOL_VERSION,
            group=facts.group,
            base_fingerprint=facts.base,
            shape=str(facts.shape),
            shard=self._shard,
            where=self._where,
            pool_bytes=facts.pool_bytes,
            num_slots=facts.num_slots,
        )
        try:
            async with asyncio.timeout(WELCOME_S):
                await stream.send(Message(follow=follow))
                first = await anext(messages, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no welcome from the head at {self._head} within {WELCOME_S:g} s") from None
        if first is None or first.WhichOneof("message") != "welcome":
            raise Unavailable(f"the head at {self._head} ended the stream instead of a welcome")
        logger.info("follows", extra={"head": self._head, "incarnation": first.welcome.incarnation})
        self._service.ready()

    async def _obey(self, stream: Duplex, messages: AsyncIterator[lora_pb2.HeadMessage]) -> NoReturn:
        sender = self._service.spawn(self._say_all(stream), "to the head")
        try:
            async for message in messages:
                # Not here: an order may wait for a kernel that runs, or for a disk.
                await asyncio.to_thread(self._pool.obey, read_order(message))
        finally:
            sender.cancel()
        raise Unavailable("the head ended the stream")

    async def _say_all(self, stream: Duplex) -> None:
        try:
            while True:
                await stream.send(await self._to_head.next())
        except Unavailable as error:
            logger.info("head not told any more", extra={"reason": error.message})
