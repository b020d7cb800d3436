"""One shard of a LoRA server group: learn the base, open the pool and its doors, say how it goes, drain, stop.

Shard 0, the head, leases for the whole group and beats for it; another one follows the head (follower.py).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from infinilora.link.open import LinkSettings, Opener, checked, fabric_of, regions_of
from infinilora.lora_server.base import find_card, watch_base
from infinilora.lora_server.commands import Commands
from infinilora.lora_server.follower import Following, ToHead
from infinilora.lora_server.leases import SERVICE, Identity, LoraServer
from infinilora.lora_server.needs import check_memory
from infinilora.lora_server.report import PoolCounts, beat, keep_residency, show_pool
from infinilora.lora_server.settings import Settings
from infinilora.lora_server.shard import Shard
from infinilora.lora_server.shards import SHARDS, Followers
from infinilora.lora_server.speed import measure_rows_per_s
from infinilora.pool.device import open_device
from infinilora.pool.follower import FollowerPool
from infinilora.pool.group import OtherShards
from infinilora.pool.news import follow_registrations, sweep_deleted
from infinilora.pool.pool import AdapterPool
from infinilora.protocol import keys, lora_pb2, subjects
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.control import Command
from infinilora.protocol.shards import HEAD
from infinilora.runtime import metrics, rpc, telemetry
from infinilora.runtime.blobs import open_blobs
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.members import Heart, Members
from infinilora.runtime.metrics import LoraServerMetrics, ObjectStoreMetrics
from infinilora.runtime.service import Service
from infinilora.runtime.store import RedisStore
from infinilora.runtime.watchdog import Watchdog
from infinilora.runtime.watched_blobs import WatchedBlobs

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Around:
    """What this process knows of the others."""

    blobs: WatchedBlobs
    bus: NatsBus
    members: Members
    store: RedisStore


async def serve(settings: Settings, service: Service) -> None:
    """Serve until a stop is asked for; then grant nothing new, let leases end, and close."""
    torch.set_num_threads(1)
    device = open_device(settings.device)
    async with AsyncExitStack() as stack:
        around = await _reach_out(settings, stack)
        card = await _find_card(settings, around, service)
        if card is None:
            return
        registry = stack.enter_context(metrics.scraped(settings.metrics_listen))
        measured = LoraServerMetrics(registry) if registry else None
        if registry:
            ObjectStoreMetrics(registry).watch(lambda: around.blobs.answers)
        service.spawn(around.blobs.ask_while_away(keys.base_card(card.fingerprint)), "object store")
        check_memory(settings, device.torch_device)
        shard = Shard(settings, card, device)
        if settings.shard == HEAD:
            await _lead(shard, around, service, measured, stack)
        else:
            await _follow(shard, around, service, measured, stack)


async def _find_card(settings: Settings, around: _Around, service: Service) -> BaseCard | None:
    """The base's card; None where a stop is asked for while it is waited for."""
    found: list[BaseCard] = []

    async def find() -> None:
        found.append(await find_card(settings.base, around.blobs, around.members))

    await _either(find(), service.draining.wait())
    return found[0] if found else None


async def _lead(
    shard: Shard, around: _Around, service: Service, measured: LoraServerMetrics | None, stack: AsyncExitStack
) -> None:
    """The head's life. Nobody is granted anything, and no command is taken, before every shard is here."""
    settings, card = shard.settings, shard.card
    followers = Followers(shard.facts, service)
    others = OtherShards(shard.sharding, settings.pool_bytes, followers.send) if shard.share else None
    watch = PoolCounts(measured) if measured else None
    pool = AdapterPool(
        shard.pool_config(), around.blobs, shard.kernels(), on_death=service.fail_threadsafe, watch=watch, others=others
    )
    stack.callback(pool.close)
    followers.use(pool)
    doors = [(SHARDS, followers)] if others else []
    address, links = await stack.enter_async_context(
        _links(shard, pool, service, measured, doors=doors, others=followers.where if others else None)
    )
    stack.callback(followers.close)
    if measured:
        show_pool(measured, pool, links)
    commands = Commands(pool)
    rows_per_s = await _speed(shard)
    heart = Heart(
        settings.nats_url,
        lambda: beat(
            shard,
            service,
            pool,
            commands,
            address=settings.advertise or address,
            rows_per_s=rows_per_s,
            away=around.blobs.away,
        ),
        interval_s=settings.beat_ms / 1000,
    )
    service.spawn(heart.run(), "heart")
    service.spawn(keep_residency(around.store, settings.group, pool, commands), "residency")
    service.spawn(follow_registrations(pool, around.bus), "registrations")
    service.spawn(sweep_deleted(pool), "sweep")
    service.spawn(watch_base(settings.base, card, around.members), "base")
    await commands.fence.read(around.store)
    await _either(followers.complete(), service.draining.wait())
    await around.bus.serve(subjects.commands("lora-server", settings.id), Command, commands.handle)
    service.ready()
    heart.beat_now()
    await service.draining.wait()
    commands.stop()
    heart.beat_now()
    await _drained(links)
    followers.close()
    await followers.closed()


async def _follow(
    shard: Shard, around: _Around, service: Service, measured: LoraServerMetrics | None, stack: AsyncExitStack
) -> None:
    """The life of another shard: as long as its head's."""
    settings = shard.settings
    assert shard.share is not None
    to_head = ToHead()
    pool = FollowerPool(
        shard.pool_config(), shard.share, around.blobs, shard.kernels(), to_head, on_death=service.fail_threadsafe
    )
    stack.callback(pool.close)
    address, links = await stack.enter_async_context(_links(shard, pool, service, measured))
    if measured:
        show_pool(measured, pool, links)
    where = lora_pb2.Shard(address=settings.advertise or address, incarnation=service.incarnation)
    following = Following(
        shard.facts, settings.shard, where, head=settings.head, pool=pool, to_head=to_head, service=service
    )
    service.spawn(watch_base(settings.base, shard.card, around.members), "base")
    service.spawn(_say_leaving(service, to_head), "leaving")
    service.spawn(sweep_deleted(pool), "sweep")
    channels = await stack.enter_async_context(rpc.Channels(token=settings.rpc_token.get_secret_value()))
    await following.run(channels)


async def _speed(shard: Shard) -> float:
    """What is told of it, else what is measured now."""
    settings, card = shard.settings, shard.card
    told = settings.rows_per_s
    measure = partial(measure_rows_per_s, card.hidden_dim, threads=settings.threads, device=shard.device)
    rows_per_s = told or await asyncio.to_thread(measure)
    logger.info("speed", extra={"rows_per_s": round(rows_per_s), "from": "setting" if told else "measurement"})
    return rows_per_s


async def _say_leaving(service: Service, to_head: ToHead) -> None:
    await service.draining.wait()
    to_head.leaves()


async def _reach_out(settings: Settings, stack: AsyncExitStack) -> _Around:
    bus = await stack.enter_async_context(NatsBus(settings.nats_url, name=settings.id))
    members = Members(bus, kinds=("engine",), interval_s=settings.beat_ms / 1000)
    blobs = WatchedBlobs(open_blobs(settings.store_url, credentials=settings.store_credentials))
    store = await stack.enter_async_context(RedisStore(settings.redis_url))
    return _Around(blobs, bus, await stack.enter_async_context(members), store)


async def _either(*waits: Coroutine[None, None, object]) -> None:
    """Until one of them is over."""
    async with asyncio.TaskGroup() as tasks:
        each = [tasks.create_task(wait) for wait in waits]
        await asyncio.wait(each, return_when=asyncio.FIRST_COMPLETED)
        for task in each:
            task.cancel()


@asynccontextmanager
async def _links(
    shard: Shard,
    pool: AdapterPool | FollowerPool,
    service: Service,
    measured: LoraServerMetrics | None,
    *,
    doors: Sequence[tuple[Any, object]] = (),
    others: Callable[[], list[lora_pb2.Shard]] | None = None,
) -> AsyncIterator[tuple[str, LoraServer]]:
    """The door for engines, and `doors` beside it. `others`: where a head's other shards are."""
    settings = shard.settings
    opener = Opener(checked(_link_settings(settings, shard.device.torch_device)))
    traces = telemetry.setup(
        "lora-server",
        settings.otlp_endpoint,
        process_id=settings.id,
        ratio=settings.trace_ratio,
        delay_ms=settings.trace_delay_ms,
    )
    async with AsyncExitStack() as stack:
        stack.callback(opener.close)
        stack.push_async_callback(asyncio.to_thread, traces.shutdown)
        identity = Identity(settings.group, shard.card.fingerprint, shard.sharding.shape)
        owns = shard.owns if shard.share else None
        server = LoraServer(
            identity,
            pool,
            opener,
            service,
            watchdog=stack.enter_context(Watchdog(settings.call_limit, service.stuck)),
            traces=traces,
            metrics=measured,
            others=others or list,
            owns=owns,
        )
        token = settings.rpc_token.get_secret_value()
        services = [(SERVICE, server), *doors]
        listening = await stack.enter_async_context(rpc.serving(settings.listen, services, token=token))
        extra = {"group": settings.group, "shape": settings.shape, "shard": settings.shard}
        logger.info("lora-server serves", extra={"address": listening.address, **extra})
        # First of all, so that engines hear the end of their streams and not a broken connection.
        stack.callback(server.close)
        yield listening.address, server


def _link_settings(settings: Settings, device: torch.device) -> LinkSettings:
    return LinkSettings(
        directory=settings.link_dir if "shm" in settings.link_backends else None,
        tcp_host=settings.link_host if "tcp" in settings.link_backends else None,
        tcp_port=settings.link_port,
        tcp_reach=settings.advertise.rpartition(":")[0].strip("[]"),
        num_buffers=settings.link_buffers,
        buffer_bytes=settings.link_buffer_bytes,
        cuda=regions_of(settings.link_backends, device),
        rdma=fabric_of(settings.link_backends, device),
    )


async def _drained(links: LoraServer) -> None:
    """Close each link once it holds no lease. `drain_s` bounds this from outside."""
    while links.open_links:
        links.close_idle()
        await asyncio.sleep(DRAIN_POLL_S)
