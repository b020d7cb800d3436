"""Opens the LoRA backend that the settings name: remote (LoRA servers), local (a pool of our own), or none.

Everything a backend needs from the control plane is fed to it here: the groups that beat, the placement table.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.grouplink import Identity
from infinilora.engine.lora.hybrid import HybridLora
from infinilora.engine.lora.interface import LoraBackend
from infinilora.engine.lora.local import LocalLora
from infinilora.engine.lora.none import NoLora
from infinilora.engine.lora.remote import RemoteLora
from infinilora.engine.settings import Settings
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.open import LinkSettings, checked, fabric_of, regions_of
from infinilora.link.widest import least_buffer_bytes
from infinilora.pool.device import open_device
from infinilora.pool.news import follow_registrations, sweep_deleted
from infinilora.pool.pool import AdapterPool, PoolConfig, PoolLoad
from infinilora.protocol.adapter import DTYPE_BYTES
from infinilora.protocol.control import GroupLoad
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.blobs import BlobStore, open_blobs
from infinilora.runtime.bus import Bus, NatsBus
from infinilora.runtime.members import Members
from infinilora.runtime.membership import Member
from infinilora.runtime.placement import PlacementMirror
from infinilora.runtime.rpc import Channels
from infinilora.runtime.service import Service
from infinilora.runtime.store import RedisStore, Store
from infinilora.runtime.watched_blobs import WatchedBlobs

logger = logging.getLogger(__name__)


class Bell:
    """Rung by a backend when a lease may have changed; heard by the step loop, which is made later."""

    def __init__(self) -> None:
        self._hear: Callable[[], None] | None = None

    def connect(self, hear: Callable[[], None]) -> None:
        self._hear = hear

    def ring(self) -> None:
        if self._hear is not None:
            self._hear()


@dataclass(frozen=True, slots=True)
class Around:
    """What an engine knows of the others."""

    bus: Bus
    members: Members
    blobs: WatchedBlobs
    store: Store


async def reach_out(settings: Settings, stack: AsyncExitStack) -> Around:
    """Open what the control plane is heard and the store is read with, until the stack ends."""
    bus = await stack.enter_async_context(NatsBus(settings.nats_url, name=settings.engine_id))
    members = Members(bus, kinds=("lora-server",), interval_s=settings.beat_ms / 1000)
    blobs = WatchedBlobs(open_blobs(settings.store_url, credentials=settings.store_credentials))
    store = await stack.enter_async_context(RedisStore(settings.redis_url))
    return Around(bus, await stack.enter_async_context(members), blobs, store)


@dataclass(frozen=True, slots=True)
class OpenLora:
    """A backend, and what an engine with a pool of its own does beside it, from any thread; without one: nothing.

    `forget` lets go of a deleted adapter; `load` tells what is in the pool, or on its way there, or failed.
    """

    backend: LoraBackend
    forget: Callable[[Digest], None] = lambda _: None
    load: Callable[[], PoolLoad | None] = lambda: None


@asynccontextmanager
async def open_lora(
    settings: Settings, model: LoadedModel, service: Service, around: Around, bell: Bell
) -> AsyncIterator[OpenLora]:
    """The backend, closed at the end of the block; by then the step thread must have stopped."""
    match settings.lora:
        case "none":
            yield OpenLora(NoLora())
        case "local":
            pool = _open_pool(settings, model, around.blobs, service)
            service.spawn(follow_registrations(pool, around.bus), "registrations")
            service.spawn(sweep_deleted(pool), "sweep")
            try:
                local = LocalLora(pool, bell.ring, first_expert=model.first_expert)
                yield OpenLora(local, pool.forget, pool.load)
            finally:
                pool.close()
        case "remote":
            async with _open_remote(settings, model, service, around, bell) as remote:
                if not settings.hybrid_bytes:
                    yield OpenLora(remote)
                    return
                pool = _open_pool(settings, model, around.blobs, service)
                service.spawn(follow_registrations(pool, around.bus), "registrations")
                service.spawn(sweep_deleted(pool), "sweep")
                try:
                    local = LocalLora(pool, bell.ring, first_expert=model.first_expert)
                    yield OpenLora(HybridLora(remote, local, pool), pool.forget, pool.load)
                finally:
                    pool.close()


def _open_pool(settings: Settings, model: LoadedModel, blobs: BlobStore, service: Service) -> AdapterPool:
    card, device = model.card, open_device(settings.device)
    pool_bytes = settings.pool_bytes if settings.lora == "local" else settings.hybrid_bytes
    kernels = SlotKernels(
        num_slots=settings.pool_slots,
        num_layers=card.num_layers + 1,
        device=device.torch_device,
        threads=settings.threads,
    )
    config = PoolConfig(
        base=card.fingerprint,
        num_layers=card.num_layers,
        capacity_bytes=pool_bytes,
        num_slots=settings.pool_slots,
        cache_dir=settings.var_dir / "cache",
        cache_bytes=settings.cache_bytes,
        host_bytes=settings.host_bytes,
        load_share=settings.load_share,
        retry_s=settings.load_retry_s,
        device=device,
        share=model.share,
    )
    logger.info("local pool", extra={"pool_bytes": pool_bytes, "num_slots": settings.pool_slots})
    return AdapterPool(config, blobs, kernels, on_death=service.fail_threadsafe)


@asynccontextmanager
async def _open_remote(
    settings: Settings, model: LoadedModel, service: Service, around: Around, bell: Bell
) -> AsyncIterator[RemoteLora]:
    base = model.card.fingerprint
    identity = Identity(
        engine_id=settings.engine_id,
        incarnation=service.incarnation,
        base=base,
        dtype=model.activation_dtype,
        max_rows=settings.step_tokens,
        least_buffer_bytes=least_buffer_bytes(
            model.card.sites,
            width=DTYPE_BYTES[model.activation_dtype],
            choices=model.spec.moe.top_k if model.spec.moe else 1,
            segments=min(settings.max_running, settings.step_tokens),
        ),
    )
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels(token=settings.rpc_token.get_secret_value()))
        placement = PlacementMirror(around.bus, around.store, base)
        backend = RemoteLora(
            model.card,
            identity,
            channels=channels,
            link=checked(_link_settings(settings)),
            on_change=bell.ring,
            slices=model.slices,
        )
        backend.place(placement.groups_of)
        stack.callback(backend.close)
        service.spawn(backend.run(), "links")
        service.spawn(_follow_groups(backend, around.members, base, settings.beat_ms / 1000), "groups")
        service.spawn(placement.run(), "placement")
        yield backend


def _link_settings(settings: Settings) -> LinkSettings:
    device = open_device(settings.device)
    return LinkSettings(
        directory=settings.link_dir if "shm" in settings.link_backends else None,
        tcp_host="127.0.0.1" if "tcp" in settings.link_backends else None,
        num_buffers=settings.link_buffers,
        buffer_bytes=settings.link_buffer_bytes,
        narrowing=settings.link_narrowing,
        narrow_limit_bytes=settings.link_narrow_limit_bytes,
        cuda=regions_of(settings.link_backends, device.torch_device),
        rdma=fabric_of(settings.link_backends, device.torch_device),
        is_on_device=not device.is_host,
    )


async def _follow_groups(backend: RemoteLora, members: Members, base: Fingerprint, interval_s: float) -> None:
    """Free bytes and residency move with every beat, so the fleet is read at that pace."""
    while True:
        backend.update_groups(list(groups_of(members.alive("lora-server"), base)))
        await asyncio.sleep(interval_s / 2)


def groups_of(members: Iterable[Member], base: Fingerprint) -> Iterable[Group]:
    """The LoRA server groups of a base, as their last beats told."""
    for member in members:
        beat = member.beat
        if beat.base == base and isinstance(beat.load, GroupLoad) and beat.state != "starting":
            yield Group(
                name=beat.group,
                address=beat.address,
                incarnation=beat.incarnation,
                bytes_free=beat.load.bytes_free,
                rows_per_s=beat.load.rows_per_s,
                leases=beat.load.leases,
                resident=frozenset(beat.load.resident),
            )
