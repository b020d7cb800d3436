"""The leader's round: look at members, registry and heat; write what should be; hint at the difference.

Every fact is read afresh and every decision is a pure function's, so a lost event, a crash or a new leader
needs no special road: the next round repairs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from infinilora.coordinator.basis import PLAN_SHARE, Basis
from infinilora.coordinator.collect import Collector, Times
from infinilora.coordinator.drains import Drains
from infinilora.coordinator.heat import Heat, TopDrift, hot_spots, top_drift
from infinilora.coordinator.hints import Hint, hints, over
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.moves import Attempts, table
from infinilora.coordinator.orders import TAKEN, Orders
from infinilora.coordinator.pins import Pins
from infinilora.coordinator.placement import Adapter, Group, Plan, Table, by_group, copies_of, place
from infinilora.coordinator.prefetch import Prefetched, Room, prefetch
from infinilora.coordinator.rebalance import Difference, difference
from infinilora.coordinator.recovery import Recovery
from infinilora.coordinator.registry import Registry
from infinilora.protocol import keys, subjects
from infinilora.protocol.admin import Frozen
from infinilora.protocol.control import AdapterEvent, Death, Evict, GroupLoad, ProcessState, Stage
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.protocol.speeds import relative_speeds
from infinilora.runtime.blobs import BlobStore
from infinilora.runtime.bus import Bus
from infinilora.runtime.members import Members
from infinilora.runtime.membership import Member
from infinilora.runtime.metrics import CoordinatorMetrics
from infinilora.runtime.placement import Written, change_between, read_placement, write_placement
from infinilora.runtime.store import Store

logger = logging.getLogger(__name__)

HOTTEST = 10_000
HEAT_SHARE = 0.05
"""Of a coordinator's time, for reading heat."""
SHOWN = 100
"""Adapters, the hottest, that are compared between half-lives."""
QUIET_S = 0.2
"""Changes that come together are one round."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that rounds depend on."""

    reconcile_s: float
    heat_half_lives_s: tuple[int, ...]
    hot_rps: float
    fill: float
    max_hints: int
    hint_pause_s: float
    move_s: float
    delete_grace_s: float
    clock_skew_s: float


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What is known of the time that comes: adapters that come by the clock."""

    expected: Callable[[], Mapping[Digest, float]] = dict
    bytes_per_s: float = 0.0
    """Of one group's staging, that prefetch may take."""


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
        self.foreseen = Foreseen()
        """Nothing, until whoever wires this says who knows."""
        self._clock = clock
        self._kicked = asyncio.Event()
        self.orders = Orders(bus, leadership, metrics)
        self._epoch: int | None = None
        """Under which everything was told, asked for and planned that is remembered here; None: nothing was."""
        self._pins = Pins(self.orders)
        self._attempts = self._no_attempts()
        self._recovery = Recovery()
        self._prefetched = Prefetched()
        self._plans: dict[Fingerprint, Table] = {}
        """This leader's latest: where the next begins. The table has more, for as long as moves take."""
        self._basis: dict[Fingerprint, Basis] = {}
        """What each of them was made from."""
        self._afresh: set[Fingerprint] = set()
        """Bases that the next round plans from empty groups."""
        self.drains = Drains(store, self.orders)
        self.registry = Registry(store)
        self._collector = Collector(
            store=store,
            blobs=blobs,
            members=members,
            leadership=leadership,
            registry=self.registry,
            orders=self.orders,
            times=Times(policy.delete_grace_s, policy.clock_skew_s),
            clock=clock,
        )
        self.heat = Heat()
        self._heat_due = clock()
        self.written: dict[Fingerprint, Written] = {}
        self.frozen: Frozen | None = None
        """By an operator: deaths are said, what was deleted is collected, drains go on; nothing else is done."""
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
        """Every change is a reason to look; a death is said at once."""
        async for change in self._members.changes():
            self._kicked.set()
            epoch = self._leadership.holding
            if change.kind == "dead" and epoch is not None:
                await self._say_deaths(epoch)

    async def _say_deaths(self, epoch: int) -> None:
        """Those that nobody has said yet: an earlier leader may have been gone by then."""
        for member in self._members.all():
            beat = member.beat
            if member.health == "dead" and not member.is_buried:
                logger.warning("dead", extra={"kind": beat.kind, "id": beat.id, "incarnation": beat.incarnation})
                death = Death(kind=beat.kind, id=beat.id, incarnation=beat.incarnation, epoch=epoch)
                self._members.bury(death)
                await self._bus.publish(subjects.DEATHS, death)

    async def follow_adapters(self) -> None:
        async for _ in self._bus.subscribe(subjects.ADAPTER_EVENTS, AdapterEvent):
            self._kicked.set()

    async def round(self) -> None:
        """Once through. While the store is away nothing is decided."""
        try:
            await self._look()
            # One epoch for the whole round: should another lead before it ends, its epoch is not ours to speak with.
            epoch = self._leadership.holding
            if epoch != self._epoch:
                self._begin_anew(epoch)
            if epoch is not None and not self._members.is_frozen:
                await self._say_deaths(epoch)
                if self.frozen is None:
                    self._attempts.look(self._resident("ready"), self._clock())
                    self._look_at_prefetched()
                    for base in sorted(self._bases()):
                        await self._reconcile(base, epoch)
                await self.drains.round({**self.engines(), **self.heads()}, self._tables(), epoch)
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

    def _begin_anew(self, epoch: int | None) -> None:
        """Of what this process did when it led before, others may have undone any part since."""
        self._epoch = epoch
        self._plans, self._basis = {}, {}
        self._attempts, self._pins = self._no_attempts(), Pins(self.orders)
        self.drains.told_nobody()
        self._collector.told_nobody()

    def _no_attempts(self) -> Attempts:
        policy = self._policy
        return Attempts(move_s=policy.move_s, pause_s=policy.hint_pause_s, max_under_way=policy.max_hints)

    async def _look(self) -> None:
        await self.registry.refresh()
        await self.look_at_drains()
        frozen = await self._store.get(keys.FREEZE, Frozen)
        self.frozen = frozen.value if frozen else None
        await self._look_at_heat()
        for base in self._bases():
            written = await read_placement(self._store, base, self.written.get(base))
            if written is not None:
                self.written[base] = written
            else:
                self.written.pop(base, None)
        self._look_for_losses()

    async def look_at_drains(self) -> None:
        """Who is to go, of the bases that anybody here is of."""
        await self.drains.refresh({member.beat.base for member in self._members.all() if member.beat.base})

    async def _look_at_heat(self) -> None:
        """So seldom that it takes HEAT_SHARE of the time of this process, and less of the store's."""
        if self._clock() < self._heat_due:
            return
        half_lives_s, asked_at = self._policy.heat_half_lives_s, self._clock()
        views = await self._store.heat(keys.heats(half_lives_s), HOTTEST)
        self.heat = Heat(dict(zip(half_lives_s, views, strict=True)))
        answered_at = self._clock()
        self._heat_due = answered_at + (answered_at - asked_at) / HEAT_SHARE
        self.metrics.heat_drift.set(1 - self.top_drift().overlap)

    def top_drift(self) -> TopDrift:
        """Of the hottest that a person is shown."""
        return top_drift(self.heat.latest, self.heat.lasting, SHOWN)

    def _look_for_losses(self) -> None:
        """Standbys too, so that a leader's death and a group's at once are not one too many."""
        resident = self._resident("ready", "draining")
        gone = [m for m in self._members.all() if m.beat.kind == "lora-server" and m.health == "dead"]
        dead = {
            m.beat.group: m.heard_at
            for m in gone
            if m.beat.group not in resident and m.beat.state != "draining"  # what drained went as it was told to
        }
        over = self._recovery.look(resident, dead, self.heat.asked_for(), self._members.now)
        self.metrics.missed.set(len(self._recovery.missed))
        for group, seconds in over.items() if self._leadership.is_leading else ():
            self.metrics.recovery_s.observe(seconds)
            logger.info("recovered from a group's death", extra={"group": group, "seconds": round(seconds, 3)})

    def _look_at_prefetched(self) -> None:
        resident = self._resident("ready", "draining")
        for outcome, count in self._prefetched.look(resident, self.heat.asked_for(), self._attempts.asked).items():
            self.metrics.prefetched.labels(outcome=outcome).inc(count)
        self.metrics.prefetched_there.set(self._prefetched.num_there)

    def _bases(self) -> set[Fingerprint]:
        served = {m.beat.base for m in self._members.all() if m.beat.kind == "lora-server" and m.beat.base}
        return served | set(self.written)

    def heads(self, *states: ProcessState) -> dict[str, Member]:
        """For each group that is not dead, the process that speaks for it, if it is in one of these states (any)."""
        there = [m for m in self._members.all() if m.beat.kind == "lora-server" and m.health != "dead"]
        return {member.beat.group: member for member in reversed(there) if not states or member.beat.state in states}

    def _resident(self, *states: ProcessState) -> dict[str, frozenset[Digest]]:
        """What is in the pool of each group in one of these states, whatever its base."""
        loads = ((group, member.beat.load) for group, member in self.heads(*states).items())
        return {group: frozenset(load.resident) for group, load in loads if isinstance(load, GroupLoad)}

    def engines(self) -> dict[str, Member]:
        """Those that are not dead, by id."""
        return {m.beat.id: m for m in self._members.all() if m.beat.kind == "engine" and m.health != "dead"}

    def _tables(self) -> Table:
        return {group: held for w in self.written.values() for group, held in w.placement.groups.items()}

    def look_again(self, *, afresh: bool = False) -> None:
        """Have a round soon that plans; with `afresh`, every base as if nothing were anywhere."""
        self._basis.clear()
        if afresh:
            self._afresh |= self._bases()
        self._kicked.set()

    async def differences(self, *, afresh: bool) -> dict[Fingerprint, Difference]:
        """What the next round would plan otherwise than engines are told now, if nothing changed until then."""
        found = {}
        for base in sorted(self._bases()):
            groups, adapters = self._groups(base), self._adapters(base, self._before(base))
            plan = await self._place(groups, adapters, {} if afresh else self._before(base))
            found[base] = difference(plan, {a.digest: a for a in adapters}, self._told(base))
        return found

    async def _reconcile(self, base: Fingerprint, epoch: int) -> None:
        servers, loads = self._servers(base), self._loads(base)
        resident = {group: frozenset(load.resident) for group, load in loads.items()}
        written, told = self.written.get(base), self._told(base)
        adapters = self._adapters(base, self._before(base))
        plan = await self._plan(base, adapters)
        latest, asked_for = self.heat.latest, self.heat.asked_for()
        rates = {a.digest: max(a.rps, latest.get(a.digest, 0.0)) for a in adapters if a.rps > 0 or a.is_pinned}
        heat = {a.digest: rates[a.digest] for a in adapters if a.digest in asked_for or a.is_pinned}
        failed = self._attempts.failed
        now_told = table(plan, told, resident, heat.keys(), failed)
        if now_told != told and not await self._write(base, now_told, written, epoch):
            return
        wanted = hints(now_told, resident, heat, self.registry.digests(), failed)
        early = self._prefetch(adapters, now_told, resident, loads, rates)
        await self._hint(wanted + early, servers, epoch, lambda hint: over(*hint[1:], now_told, resident, rates))
        self._prefetched.begun({(hint.group, hint.digest) for hint in early} & self._attempts.asked)
        await self._pin(servers, now_told, {a.digest for a in adapters if a.is_pinned}, epoch)

    def _servers(self, base: Fingerprint) -> dict[str, Member]:
        return {group: member for group, member in self.heads("ready").items() if member.beat.base == base}

    def _loads(self, base: Fingerprint) -> dict[str, GroupLoad]:
        servers = self._servers(base).items()
        return {group: m.beat.load for group, m in servers if isinstance(m.beat.load, GroupLoad)}

    def _told(self, base: Fingerprint) -> Table:
        """What engines are told now."""
        written = self.written.get(base)
        return written.placement.groups if written else {}

    def _before(self, base: Fingerprint) -> Table:
        """Where the next plan begins."""
        return self._plans.get(base, self._told(base))

    def _adapters(self, base: Fingerprint, current: Table) -> list[Adapter]:
        """What is to be placed, with its heat; what is expected soon and has none, with what is expected of it."""
        heat = {**self.foreseen.expected(), **self.heat.to_plan_with()}
        hot = hot_spots(heat, self._policy.hot_rps, copies_of(current))
        return [
            replace(adapter, rps=heat[digest], copies=hot.get(digest, 1)) if digest in heat else adapter
            for digest, adapter in self.registry.adapters(base).items()
        ]

    def _groups(self, base: Fingerprint) -> list[Group]:
        servers, loads = self._servers(base), self._loads(base)
        speeds = relative_speeds({group: load.rows_per_s for group, load in loads.items()})
        return [
            Group(
                group,
                load.bytes_total,
                speed=speeds[group],
                host=servers[group].beat.address.rpartition(":")[0],
                state="draining" if group in self.drains.wanted else "ready",
            )
            for group, load in loads.items()
        ]

    async def _plan(self, base: Fingerprint, adapters: list[Adapter]) -> Table:
        """The latest, for as long as what it was made from holds."""
        groups, before = self._groups(base), {} if base in self._afresh else self._before(base)
        begun_at, basis = self._clock(), self._basis.get(base)
        if basis and base not in self._afresh and basis.holds(self._basis_of(base, groups, adapters, begun_at)):
            return self._plans[base]
        self._afresh.discard(base)
        self._plans[base] = by_group(await self._place(groups, adapters, before), groups)
        took_s = self._clock() - begun_at
        self._basis[base] = self._basis_of(base, groups, adapters, begun_at + took_s / PLAN_SHARE)
        return self._plans[base]

    def _basis_of(self, base: Fingerprint, groups: list[Group], adapters: list[Adapter], follow_at: float) -> Basis:
        planned = {digest for digests in self._plans[base].values() for digest in digests}
        rates = {adapter.digest: adapter.rps for adapter in adapters if adapter.rps > 0}
        return Basis(
            groups=groups,
            registered=self.registry.adapters(base),
            copies={adapter.digest: adapter.copies for adapter in adapters if adapter.copies > 1},
            rising=self.heat.rising().keys(),
            homeless=rates.keys() - planned,
            rates=rates,
            follow_at=follow_at,
        )

    async def _place(self, groups: list[Group], adapters: list[Adapter], before: Table) -> Plan:
        # A large fleet takes seconds: the lease has to be renewed meanwhile.
        return await asyncio.to_thread(place, groups, adapters, before, fill=self._policy.fill)

    def _prefetch(
        self,
        adapters: list[Adapter],
        told: Table,
        resident: Mapping[str, frozenset[Digest]],
        loads: Mapping[str, GroupLoad],
        rates: Mapping[Digest, float],
    ) -> list[Hint]:
        """Of what has no heat; the rest is hinted at."""
        asked_for = self.heat.asked_for()
        expected = {d: rps for d, rps in self.foreseen.expected().items() if d not in asked_for}
        if not expected:
            return []
        sizes = {a.digest: a.num_bytes for a in adapters}
        rooms = {group: Room(load.bytes_free, load.bytes_total) for group, load in loads.items()}
        under_way, bytes_per_s = self._attempts.asked, self.foreseen.bytes_per_s
        return prefetch(expected, told, resident, rooms, sizes, under_way, bytes_per_s, rates)

    async def _write(self, base: Fingerprint, groups: Table, before: Written | None, epoch: int) -> bool:
        """False if another leads: the next round reads what it wrote, and its epoch."""
        if before is not None and before.placement.epoch > epoch:
            await self._leadership.resign()
            return False
        written = await write_placement(self._store, base, groups, before, epoch=epoch)
        if written is None:
            return False
        self.written[base] = written
        self.metrics.placements.inc()
        revision = written.placement.revision
        logger.info("placement written", extra={"base": base, "revision": revision, "epoch": epoch})
        change = change_between(before.placement if before else None, written.placement)
        await self._bus.publish(subjects.PLACEMENT_EVENTS, change)
        return True

    async def _hint(
        self, wanted: list[Hint], servers: dict[str, Member], epoch: int, over: Callable[[Hint], tuple[Digest, ...]]
    ) -> None:
        """`over`: what may go for it."""
        lives = {group: server.beat.incarnation for group, server in servers.items()}
        async with asyncio.TaskGroup() as tasks:
            for hint in self._attempts.take(wanted, self._clock(), lives):
                is_staging = hint.action == "stage"
                body = Stage(digest=hint.digest, over=over(hint)) if is_staging else Evict(digest=hint.digest)
                tasks.create_task(self._give(hint, body, servers[hint.group], epoch))

    async def _pin(self, servers: dict[str, Member], told: Table, pinned: set[Digest], epoch: int) -> None:
        lives = {group: server.beat.incarnation for group, server in servers.items()}
        answering = {group: s for group, s in servers.items() if not self._attempts.is_silent(group, lives[group])}
        for group in await self._pins.round(answering, told, pinned, epoch):
            self._attempts.unanswered(group, lives[group], self._clock())

    async def _give(self, hint: Hint, body: Stage | Evict, server: Member, epoch: int) -> None:
        outcome = await self.orders.give(server, body, epoch)
        if outcome != TAKEN:
            self._attempts.refused(hint)
        if outcome == Unavailable.code:
            self._attempts.unanswered(hint.group, server.beat.incarnation, self._clock())
