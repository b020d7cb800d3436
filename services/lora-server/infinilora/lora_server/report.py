"""What a LoRA server says of itself: beats, residency in the store, gauges."""

import asyncio
import logging
from functools import partial

from infinilora.lora_server.commands import Commands
from infinilora.lora_server.leases import LoraServer
from infinilora.lora_server.shard import Shard
from infinilora.pool.follower import FollowerPool
from infinilora.pool.pool import AdapterPool
from infinilora.protocol import keys
from infinilora.protocol.control import Beat, GroupLoad
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.runtime.metrics import LoraServerMetrics
from infinilora.runtime.service import Service
from infinilora.runtime.store import Store

logger = logging.getLogger(__name__)

RESIDENCY_EVERY_S = 1.0
RESIDENCY_TTL_S = 10.0


def beat(
    shard: Shard,
    service: Service,
    pool: AdapterPool,
    commands: Commands,
    *,
    address: str,
    rows_per_s: float,
    away: tuple[str, ...] = (),
) -> Beat:
    """How it goes now. Runs on the heart's thread: reads only. `rows_per_s`: of this shard."""
    load = pool.load()
    settings, card = shard.settings, shard.card
    num_shards = shard.sharding.shape.num_shards
    return Beat(
        kind="lora-server",
        id=settings.id,
        incarnation=service.incarnation,
        seq=0,
        state=service.told(is_draining=commands.is_draining),
        address=address,
        base=card.fingerprint,
        model=card.name,
        group=settings.group,
        away=away,
        load=GroupLoad(
            # The pool counts what an adapter takes of its fullest shard; a group has so much of each. Shards compute
            # side by side, at different sites or for different engines, and are taken to be as fast as the head.
            bytes_free=load.bytes_free * num_shards,
            bytes_total=load.bytes_total * num_shards,
            leases=load.leases,
            resident=load.resident,
            loading=load.loading,
            failed=load.failed,
            pinned=load.pinned,
            shape=settings.shape,
            rows_per_s=rows_per_s * num_shards,
        ),
    )


async def keep_residency(store: Store, group: str, pool: AdapterPool, commands: Commands) -> None:
    """Write what is resident, with a time to live, and learn the epoch if it is not known yet."""
    while True:
        await commands.fence.read(store)
        try:
            await store.put(keys.residency(group), pool.resident(), ttl_s=RESIDENCY_TTL_S)
        except Unavailable as error:
            logger.debug("residency not written", extra={"reason": error.message})
        except Internal as error:  # a person must mend it; beats say what is resident, too
            logger.error("residency refused", extra={"reason": error.message})  # noqa: TRY400 - no traceback
        await asyncio.sleep(RESIDENCY_EVERY_S)


class PoolCounts:
    """The pool's events as counters."""

    def __init__(self, metrics: LoraServerMetrics) -> None:
        self._metrics = metrics

    def loaded(self, tier: str, seconds: float) -> None:
        self._metrics.loads.labels(outcome="resident").inc()
        self._metrics.load_s.labels(tier=tier).observe(seconds)

    def load_failed(self, code: str) -> None:
        self._metrics.loads.labels(outcome=code).inc()

    def drained(self) -> None:
        self._metrics.evictions.inc()


def show_pool(metrics: LoraServerMetrics, pool: AdapterPool | FollowerPool, server: LoraServer) -> None:
    """Gauges that are read when scraped."""
    metrics.bytes_free.set_function(lambda: pool.load().bytes_free)
    metrics.bytes_total.set_function(lambda: pool.load().bytes_total)
    metrics.resident.set_function(lambda: len(pool.load().resident))
    metrics.leases.set_function(lambda: pool.load().leases)
    metrics.waiting.set_function(lambda: pool.load().waiting)
    for tier in ("disk", "host"):
        metrics.tier_bytes.labels(tier=tier).set_function(partial(_tier_bytes, pool, tier))
    metrics.links.set_function(lambda: len(server.open_links))


def _tier_bytes(pool: AdapterPool | FollowerPool, tier: str) -> int:
    return pool.tier_bytes()[tier]
