"""One shard of a LoRA server group: learn the base, open the pool and its doors, say how it goes, drain, stop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.open import LinkSettings, Opener
from infinilora.lora_server.base import find_card, watch_base
from infinilora.lora_server.commands import Commands
from infinilora.lora_server.leases import SERVICE, Identity, LoraServer
from infinilora.lora_server.report import PoolCounts, beat, keep_residency, show_pool
from infinilora.lora_server.settings import Settings
from infinilora.pool.news import follow_registrations
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.pool.tenancy import Limits
from infinilora.protocol import subjects
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.control import Command
from infinilora.runtime import metrics, rpc, telemetry
from infinilora.runtime.blobs import BlobStore, open_blobs
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.members import Heart, Members
from infinilora.runtime.metrics import LoraServerMetrics
from infinilora.runtime.service import Service
from infinilora.runtime.store import RedisStore

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Around:
    """What this process knows of the others."""

    blobs: BlobStore
    bus: NatsBus
    members: Members
    store: RedisStore


async def serve(settings: Settings, service: Service) -> None:
    """Serve until a stop is asked for; then grant nothing new, let leases end, and close."""
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        around = await _reach_out(settings, stack)
        card = await find_card(settings.base, around.blobs, around.members)
        registry = stack.enter_context(metrics.scraped(settings.metrics_listen))
        measured = LoraServerMetrics(registry) if registry else None
        pool = stack.enter_context(_pool(settings, card, around.blobs, service, measured))
        address, links = await stack.enter_async_context(_links(settings, card, pool, service, measured))
        if measured:
            show_pool(measured, pool, links)
        commands = Commands(pool)
        heart = Heart(
            settings.nats_url,
            partial(beat, settings, service, card, pool, commands, settings.advertise or address),
            interval_s=settings.beat_ms / 1000,
        )
        service.spawn(heart.run(), "heart")
        service.spawn(keep_residency(around.store, settings.group, pool, commands), "residency")
        service.spawn(follow_registrations(pool, around.bus), "registrations")
        service.spawn(watch_base(settings.base, card, around.members), "base")
        await commands.read_epoch(around.store)
        await around.bus.serve(subjects.commands("lora-server", settings.id), Command, commands.handle)
        service.ready()
        heart.beat_now()
        await service.draining.wait()
        commands.stop()
        heart.beat_now()
        await _drained(links)


async def _reach_out(settings: Settings, stack: AsyncExitStack) -> _Around:
    bus = await stack.enter_async_context(NatsBus(settings.nats_url, name=settings.id))
    members = Members(bus, kinds=("engine",), interval_s=settings.beat_ms / 1000)
    blobs = open_blobs(settings.store_url, credentials=settings.store_credentials)
    store = await stack.enter_async_context(RedisStore(settings.redis_url))
    return _Around(blobs, bus, await stack.enter_async_context(members), store)


@contextmanager
def _pool(
    settings: Settings, card: BaseCard, blobs: BlobStore, service: Service, measured: LoraServerMetrics | None
) -> Iterator[AdapterPool]:
    num_slots = settings.slots
    kernels = SlotKernels(
        num_slots=num_slots, num_layers=card.num_layers + 1, device=settings.device, threads=settings.threads
    )
    config = PoolConfig(
        base=card.fingerprint,
        num_layers=card.num_layers,
        capacity_bytes=settings.pool_bytes,
        num_slots=num_slots,
        cache_dir=settings.cache,
        cache_bytes=settings.cache_bytes,
        host_bytes=settings.host_bytes,
        loader_threads=settings.loader_threads,
        fetch_threads=settings.fetch_threads,
        load_share=settings.load_share,
        device=settings.device,
        limits=Limits(settings.max_bypass, settings.age_after_s, settings.max_wait_s),
    )
    logger.info(
        "pool",
        extra={
            "base": card.name,
            "fingerprint": card.fingerprint,
            "pool_bytes": settings.pool_bytes,
            "num_slots": num_slots,
            "slots_from": "setting" if settings.num_slots else "pool_bytes",
            "cache_dir": str(settings.cache),
        },
    )
    watch = PoolCounts(measured) if measured else None
    pool = AdapterPool(config, blobs, kernels, on_death=service.fail_threadsafe, watch=watch)
    try:
        yield pool
    finally:
        pool.close()


@asynccontextmanager
async def _links(
    settings: Settings, card: BaseCard, pool: AdapterPool, service: Service, measured: LoraServerMetrics | None
) -> AsyncIterator[tuple[str, LoraServer]]:
    opener = Opener(_link_settings(settings))
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
        identity = Identity(settings.group, card.fingerprint)
        server = LoraServer(identity, pool, opener, service, traces=traces, metrics=measured)
        token = settings.rpc_token.get_secret_value()
        listening = await stack.enter_async_context(rpc.serving(settings.listen, [(SERVICE, server)], token=token))
        logger.info("lora-server serves", extra={"address": listening.address, "group": settings.group})
        # First of all, so that engines hear the end of their streams and not a broken connection.
        stack.callback(server.close)
        yield listening.address, server


def _link_settings(settings: Settings) -> LinkSettings:
    return LinkSettings(
        directory=settings.link_dir if "shm" in settings.link_backends else None,
        tcp_host=settings.link_host if "tcp" in settings.link_backends else None,
        tcp_port=settings.link_port,
        num_buffers=settings.link_buffers,
        buffer_bytes=settings.link_buffer_bytes,
    )


async def _drained(links: LoraServer) -> None:
    """Close each link once it holds no lease. `drain_s` bounds this from outside."""
    while links.open_links:
        links.close_idle()
        await asyncio.sleep(DRAIN_POLL_S)
