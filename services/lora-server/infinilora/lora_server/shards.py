"""The head's door for the other shards of its group: orders out, and what came of them back to the head's pool.

follower                            head
  Follow(group, base, shape, shard) ->   checks that all of it is as it should be
                                  <-     Welcome(incarnation)
                                  <-     StageSlot, EmptySlot, ForgetDigest
  ShardReady, ShardFailed, ShardEmptied ->  the pool

A group lives and dies as one: when a shard's stream ends, so does this process, and with it every stream of every
engine and every other shard. Whoever comes back begins empty.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch

from infinilora.pool.group import EmptySlot, ForgetDigest, Order, StageSlot
from infinilora.pool.pool import AdapterPool
from infinilora.pool.scales import SiteScale
from infinilora.protocol import lora_pb2
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import (
    Conflict,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Unavailable,
    WireError,
    from_wire,
)
from infinilora.protocol.ids import PROTOCOL_VERSION, Digest, Fingerprint
from infinilora.protocol.shards import HEAD, Shape
from infinilora.runtime.rpc import Call
from infinilora.runtime.service import Service

logger = logging.getLogger(__name__)

SHARDS = lora_pb2.DESCRIPTOR.services_by_name["Shards"]
FOLLOW_S = 5.0


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What every shard of a group must agree on."""

    group: str
    base: Fingerprint
    shape: Shape
    pool_bytes: int
    num_slots: int


class Followers:
    """The rpc. `_streams`: what each shard that is here is still to be told; None ends its stream."""

    def __init__(self, facts: GroupFacts, service: Service) -> None:
        self._facts = facts
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, asyncio.Queue[lora_pb2.HeadMessage | None]] = {}
        self._where: dict[int, lora_pb2.Shard] = {}
        self._complete = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_closing = False
        self._pool: AdapterPool | None = None
        if facts.shape.num_shards == 1:
            self._complete.set()

    def use(self, pool: AdapterPool) -> None:
        """Whom answers go to. Before the door opens."""
        self._pool = pool

    async def complete(self) -> None:
        """Wait until every shard of the group is here."""
        await self._complete.wait()

    def where(self) -> list[lora_pb2.Shard]:
        """The other shards, by number from 1 on. Raises Unavailable while one is missing."""
        if not self._complete.is_set():
            missing = sorted(set(range(HEAD + 1, self._facts.shape.num_shards)) - self._streams.keys())
            raise Unavailable(f"group {self._facts.group} is not whole yet: shards {missing} are missing")
        return [self._where[shard] for shard in sorted(self._where)]

    def send(self, shard: int, order: Order) -> None:
        """Have a shard do something. From any thread; in order for each shard."""
        self._loop.call_soon_threadsafe(self._put, shard, _message(order))

    def close(self) -> None:
        """End every stream; the shards end then too."""
        self._is_closing = True
        for stream in self._streams.values():
            stream.put_nowait(None)

    async def closed(self) -> None:
        """Wait until every stream has ended."""
        await self._empty.wait()

    async def follow(
        self, requests: AsyncIterator[lora_pb2.FollowerMessage], _call: Call
    ) -> AsyncIterator[lora_pb2.HeadMessage]:
        follow = await self._first(requests)
        shard = follow.shard
        self._check(follow)
        stream = self._streams[shard] = asyncio.Queue()
        self._where[shard] = follow.where
        self._empty.clear()
        try:
            yield lora_pb2.HeadMessage(welcome=self._welcome())
            reader = self._service.spawn(self._read(requests, shard, stream), f"shard {shard}")
            logger.info("shard is here", extra={"shard": shard, "address": follow.where.address})
            if len(self._streams) == self._facts.shape.num_shards - 1:
                self._complete.set()
            try:
                while (message := await stream.get()) is not None:
                    yield message
            finally:
                reader.cancel()
        finally:
            self._end(shard)

    def _put(self, shard: int, message: lora_pb2.HeadMessage) -> None:
        if stream := self._streams.get(shard):  # one that is gone takes this process with it
            stream.put_nowait(message)

    async def _first(self, requests: AsyncIterator[lora_pb2.FollowerMessage]) -> lora_pb2.Follow:
        try:
            async with asyncio.timeout(FOLLOW_S):
                first = await anext(requests)
        except TimeoutError:
            raise DeadlineExceeded(f"no follow from the shard within {FOLLOW_S:g} s") from None
        except StopAsyncIteration:
            raise InvalidRequest("the stream ended before follow") from None
        if first.WhichOneof("message") != "follow":
            raise InvalidRequest(f"found {first.WhichOneof('message')}; wanted follow")
        return first.follow

    def _check(self, follow: lora_pb2.Follow) -> None:
        facts = self._facts
        wanted = {
            "protocol_version": PROTOCOL_VERSION,
            "group": facts.group,
            "base_fingerprint": facts.base,
            "shape": str(facts.shape),
            "pool_bytes": facts.pool_bytes,
            "num_slots": facts.num_slots,
        }
        for name, value in wanted.items():
            if (found := getattr(follow, name)) != value:
                raise Conflict(f"shard {follow.shard} of group {facts.group}: {name} is {found}; the head's {value}")
        if not HEAD < follow.shard < facts.shape.num_shards:
            raise Conflict(f"shard {follow.shard} of a group of shape {facts.shape}")
        if self._is_closing or follow.shard in self._streams:
            raise Unavailable(f"shard {follow.shard} of group {facts.group} is here already, or the group ends")

    def _welcome(self) -> lora_pb2.Welcome:
        incarnation = self._service.incarnation
        return lora_pb2.Welcome(protocol_version=PROTOCOL_VERSION, group=self._facts.group, incarnation=incarnation)

    async def _read(
        self,
        requests: AsyncIterator[lora_pb2.FollowerMessage],
        shard: int,
        stream: "asyncio.Queue[lora_pb2.HeadMessage | None]",
    ) -> None:
        try:
            async for message in requests:
                self._take(shard, message)
        finally:
            stream.put_nowait(None)

    def _take(self, shard: int, message: lora_pb2.FollowerMessage) -> None:
        assert self._pool is not None
        match message.WhichOneof("message"):
            case "ready":
                news = message.ready
                scales = [read_scale(scale) for scale in news.scales]
                self._pool.shard_ready(
                    shard, news.slot, news.slot_generation, news.count, scales=scales, tier=news.tier
                )
            case "failed":
                lost = message.failed
                error = from_wire(WireError(code=lost.code, message=f"shard {shard}: {lost.message}"))
                self._pool.shard_failed(lost.slot, lost.slot_generation, error)
            case "emptied":
                self._pool.shard_emptied(shard, message.emptied.slot, message.emptied.slot_generation)
            case "leaves":
                logger.info("shard was asked to stop; the group drains", extra={"shard": shard})
                self._service.drain()
            case other:
                raise InvalidRequest(f"shard {shard} said {other!r} after its follow")

    def _end(self, shard: int) -> None:
        del self._streams[shard], self._where[shard]
        if not self._streams:
            self._empty.set()
        if self._complete.is_set() and not self._is_closing:
            reason = f"shard {shard} of group {self._facts.group} is gone: the group ends with it"
            self._service.fail_threadsafe(Unavailable(reason))


def read_scale(scale: lora_pb2.ColumnScale) -> SiteScale:
    """A column scale as a shard sent it."""
    values = np.frombuffer(scale.factors, "<f4").astype(np.float32)
    return SiteScale(scale.layer, Site(scale.site), torch.from_numpy(values))


def _message(order: Order) -> lora_pb2.HeadMessage:
    match order:
        case StageSlot(digest, slot, generation, starts):
            stage = lora_pb2.StageSlot(digest=digest, slot=slot, slot_generation=generation, starts=starts)
            return lora_pb2.HeadMessage(stage=stage)
        case EmptySlot(slot, generation):
            return lora_pb2.HeadMessage(empty=lora_pb2.EmptySlot(slot=slot, slot_generation=generation))
        case ForgetDigest(digest):
            return lora_pb2.HeadMessage(forget=lora_pb2.ForgetDigest(digest=digest))
        case _:
            assert_never(order)


def read_order(message: lora_pb2.HeadMessage) -> Order:
    """What the head wants done. Raises Internal for what is no order."""
    match message.WhichOneof("message"):
        case "stage":
            stage = message.stage
            return StageSlot(Digest(stage.digest), stage.slot, stage.slot_generation, tuple(stage.starts))
        case "empty":
            return EmptySlot(message.empty.slot, message.empty.slot_generation)
        case "forget":
            return ForgetDigest(Digest(message.forget.digest))
        case other:
            raise Internal(f"the head said {other!r} after its welcome")
