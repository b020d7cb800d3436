"""The leader's round: look at members, registry and heat; write what should be; hint at the difference.

Every fact is read afresh and every decision is a pure function's, so a lost event, a crash or a new leader
needs no special road: the next round repairs.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from infinilora.coordinator.collect import Collector, Times
from infinilora.coordinator.heat import hot_spots
from infinilora.coordinator.hints import Hint, hints
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.orders import Orders
from infinilora.coordinator.pins import Pins
from infinilora.coordinator.placement import Group, Table, by_group, copies_of, place
from infinilora.coordinator.registry import Registry
from infinilora.protocol import keys, subjects
from infinilora.protocol.control import AdapterEvent, Evict, GroupLoad, Placement, Stage
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.blobs import BlobStore
from infinilora.runtime.bus import Bus
from infinilora.runtime.members import Members
from infinilora.runtime.membership import Member
from infinilora.runtime.metrics import CoordinatorMetrics
from infinilora.runtime.store import Store, Value

logger = logging.getLogger(__name__)

HOTTEST = 10_000
QUIET_S = 0.2
"""Changes that come together are one round."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that rounds depend on."""

    reconcile_s: float
    heat_half_life_s: int
    hot_rps: float
    fill: float
    max_hints: int
    hint_pause_s: float
    delete_grace_s: float
    clock_skew_s: float


class Reconciler:
    """Holds what the last round saw, for `/v1/fleet`; a standby keeps it fresh too, and decides nothing."""

    def __init__(
        self,
        *,
        store: Store,
        bus: Bus,
        members: Members,
        leadership: Leadership,
        metrics: CoordinatorMetrics,
        policy: Policy,
        blobs: BlobStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._bus = bus
        self._members = members
        self._leadership = leadership
        self.metrics = metrics
        self._policy = policy
        self._clock = clock
        self._kicked = asyncio.Event()
        self._hinted: dict[Hint, float] = {}
        self._orders = Orders(bus, leadership, metrics)
        self._pins = Pins(self._orders)
        self.registry = Registry(store)
        self._collector = Collector(
            store=store,
            blobs=blobs,
            members=members,
            leadership=leadership,
            registry=self.registry,
            orders=self._orders,
            times=Times(policy.delete_grace_s, policy.clock_skew_s),
            clock=clock,
        )
        self.heat: dict[Digest, float] = {}
        self.placements: dict[Fingerprint, Value[Placement]] = {}
        self.store_answers = False
        self.looked = asyncio.Event()
        """Set once the store has answered a whole round."""

    async def run(self) -> None:
        """A round each interval, and soon after something changed."""
        while True:
            await self.round()
            try:
                async with asyncio.timeout(self._policy.reconcile_s):
                    await self._kicked.wait()
                await asyncio.sleep(QUIET_S)
            except TimeoutError:
                continue
            finally:
                self._kicked.clear()

    async def follow_members(self) -> None:
        async for _ in self._members.changes():
            self._kicked.set()

    async def follow_adapters(self) -> None:
        async for _ in self._bus.subscribe(subjects.ADAPTER_EVENTS, AdapterEvent):
            self._kicked.set()

    async def round(self) -> None:
        """Once through. While the store is away nothing is decided."""
        try:
            await self._look()
            # One epoch for the whole round: should another lead before it ends, its epoch is not ours to speak with.
            epoch = self._leadership.holding
            if epoch is not None and not self._members.is_frozen:
                for base in sorted(self._bases()):
                    await self._reconcile(base, epoch)
                await self._collector.round(epoch)
        except Unavailable as error:
            if self.store_answers:
                logger.warning("round given up", extra={"error": error.message})
            self.store_answers = False
            return
        except Internal as error:  # a fact that cannot be read: what was placed stays until a person has mended it
            logger.error("round given up", extra={"error": error.message})  # noqa: TRY400 - no traceback
            return
        self.store_answers = True
        self.looked.set()

    async def _look(self) -> None:
        await self.registry.refresh()
        now = datetime.now(UTC).timestamp()
        half_life_s = self._policy.heat_half_life_s
        self.heat = await self._store.heat(keys.heat(half_life_s), half_life_s, now, HOTTEST)
        for base in self._bases():
            value = await self._store.get(keys.placement(base), Placement)
            if value is not None:
                self.placements[base] = value

    def _bases(self) -> set[Fingerprint]:
        served = {m.beat.base for m in self._members.all() if m.beat.kind == "lora-server" and m.beat.base}
        return served | set(self.placements)

    def _servers(self, base: Fingerprint) -> dict[str, Member]:
        """For each group of a base that can be given work, the process that takes its commands."""
        ready = [m for m in self._members.alive("lora-server") if m.beat.base == base]
        return {member.beat.group: member for member in reversed(ready)}

    async def _reconcile(self, base: Fingerprint, epoch: int) -> None:
        servers = self._servers(base)
        loads = {group: m.beat.load for group, m in servers.items() if isinstance(m.beat.load, GroupLoad)}
        before = self.placements.get(base)
        current: Table = dict(before.value.groups) if before else {}
        hot = hot_spots(self.heat, self._policy.hot_rps, copies_of(current))
        adapters = [
            replace(adapter, rps=self.heat[digest], copies=hot.get(digest, 1)) if digest in self.heat else adapter
            for digest, adapter in self.registry.adapters(base).items()
        ]
        groups = [
            Group(group, load.bytes_total, host=servers[group].beat.address.rpartition(":")[0])
            for group, load in loads.items()
        ]
        # A large fleet takes seconds: the lease has to be renewed meanwhile.
        plan = await asyncio.to_thread(place, groups, adapters, current, fill=self._policy.fill)
        table = by_group(plan, groups)
        if table != current:
            await self._write(base, table, before, epoch)
        resident = {group: frozenset(load.resident) for group, load in loads.items()}
        heat = {a.digest: a.rps for a in adapters if a.rps > 0 or a.is_pinned}
        await self._hint(hints(plan, resident, heat, self.registry.digests()), servers, epoch)
        await self._pins.round(servers, table, {a.digest for a in adapters if a.is_pinned}, epoch)

    async def _write(self, base: Fingerprint, table: Table, before: Value[Placement] | None, epoch: int) -> None:
        if before is not None and before.value.epoch > epoch:
            await self._leadership.resign()
            return
        revision = before.value.revision + 1 if before else 1
        placement = Placement(base=base, epoch=epoch, revision=revision, groups=table)
        swap = await self._store.compare_and_set(keys.placement(base), before.raw if before else None, placement)
        if not swap:
            return  # another leader wrote: the next round reads it, and its epoch
        self.metrics.placements.inc()
        logger.info("placement written", extra={"base": base, "revision": revision, "epoch": epoch})
        await self._bus.publish(subjects.PLACEMENT_EVENTS, placement)

    async def _hint(self, wanted: list[Hint], servers: dict[str, Member], epoch: int) -> None:
        now = self._clock()
        pause_s = self._policy.hint_pause_s
        self._hinted = {hint: at for hint, at in self._hinted.items() if now - at < pause_s}
        fresh = [hint for hint in wanted if hint not in self._hinted][: self._policy.max_hints]
        self._hinted |= dict.fromkeys(fresh, now)
        async with asyncio.TaskGroup() as group:
            for hint in fresh:
                body = Stage(digest=hint.digest) if hint.action == "stage" else Evict(digest=hint.digest)
                group.create_task(self._orders.give(servers[hint.group], body, epoch))
