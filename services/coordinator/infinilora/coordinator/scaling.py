"""The leader's third round: from demand to desired counts, and one careful step towards them. Once a second.

What is decided is in `scale`, `demand`, `victims` (pure). Here facts are read, counts are written under the leader's
epoch, and whoever carries them out is told the state that should be.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from infinilora.coordinator.demand import Demand
from infinilora.coordinator.drains import is_drained
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.provision.pools import Demand as Asked
from infinilora.coordinator.reconcile import Reconciler
from infinilora.coordinator.remember import Remembrance
from infinilora.coordinator.scale import Bounds, Decision, Tier, Wanted, for_bytes, for_load, most_of
from infinilora.coordinator.slo import Alarms
from infinilora.coordinator.traffic import Watched
from infinilora.coordinator.victims import Holding, Step, number_of, step
from infinilora.protocol import keys
from infinilora.protocol.control import EngineLoad, GroupLoad
from infinilora.protocol.errors import InfiniLoraError, Internal, Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.protocol.scale import TIERS, Desired, TierName, by_hand
from infinilora.runtime.members import Members
from infinilora.runtime.membership import Member
from infinilora.runtime.store import Change, Store, Value, fence

logger = logging.getLogger(__name__)

ROUND_S = 1.0
AGAIN_S = 5.0
MOST_ADAPTERS = 2000
"""The hottest, that groups are counted for: the rest is asked for so rarely that it takes no room worth counting."""
MARGIN = 0.1


_There = Mapping[TierName, Mapping[str, Member]]
"""Of each tier, the instances that are not dead."""


class Backend(Protocol):
    """Carries counts out. Told again and again; `apply` of what is so already is cheap and changes nothing.

    `leads` says, from any thread, whether what is told still is the leader's word.
    """

    async def apply(self, desired: Desired, leads: Callable[[], bool]) -> None: ...
    async def present(self, desired: Desired) -> dict[TierName, int]:
        """How many it was told to have before; without a tier that it does not know."""
        ...


class Followed:
    """Somebody reads the counts at `/v1/scale` and follows them: there is nobody to be told."""

    async def apply(self, desired: Desired, leads: Callable[[], bool]) -> None:
        """What is shown is enough."""

    async def present(self, desired: Desired) -> dict[TierName, int]:  # noqa: ARG002 - the interface's
        return {}


@dataclass(frozen=True, slots=True)
class Sizing:
    """The settings that counts depend on. `engine_sequences`, `group_sequences`: what one serves within the SLO."""

    bounds: dict[TierName, Bounds]
    engine_sequences: float
    group_sequences: float
    idle_s: float
    iar: float
    fill: float


class Autoscaler:
    """`desired` as the store has it, by base. A standby keeps it fresh and decides nothing."""

    def __init__(
        self,
        *,
        store: Store,
        members: Members,
        leadership: Leadership,
        reconciler: Reconciler,
        watched: Watched,
        sizing: Sizing,
        backend: Backend | None,
        alarms: Alarms,
    ) -> None:
        """`backend` None: counts are shown and nobody here follows them, so nothing is drained."""
        self._store = store
        self._members = members
        self._leadership = leadership
        self._reconciler = reconciler
        self._watched = watched
        self._remembrance = Remembrance(store, watched)
        self._sizing = sizing
        self._backend = backend
        self._alarms = alarms
        self._clock = watched.clock
        self._tiers: dict[tuple[Fingerprint, TierName], Tier] = {}
        self._groups_wanted: dict[Fingerprint, Wanted] = {}
        self._group_bytes: dict[Fingerprint, int] = {}
        self._by_hand: Mapping[str, int] = {}
        self._told: dict[Fingerprint, tuple[Desired, float]] = {}
        self.desired: dict[Fingerprint, Desired] = {}
        self._asleep: Mapping[Fingerprint, str] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            await self.round()

    async def round(self) -> None:
        """Once through. While the store is away, or decisions are frozen, nothing is decided."""
        is_over = self._watched.tick()
        if is_over:
            await self._count_groups()
        try:
            read = await self._look()
            epoch = self._leadership.holding
            if epoch is None:
                self._tiers.clear()
                return
            await self._remembrance.take_up(self._known(), epoch)
            if is_over:
                await self._remembrance.leave(epoch)
            is_frozen = self._members.is_frozen or self._reconciler.frozen is not None
            if is_frozen or not self._reconciler.looked.is_set():
                return
            for base in sorted(self._bases()):
                await self._scale(base, read.get(base), epoch)
        except Unavailable as error:
            logger.debug("scaling given up for now", extra={"error": error.message})
        except Internal as error:  # a fact that cannot be read: the counts stay until a person has mended it
            logger.error("scaling given up for now", extra={"error": error.message})  # noqa: TRY400 - no traceback

    def show(self) -> dict[str, Any]:
        """For a person, and for who follows the counts."""
        return {
            "desired": [msgspec.to_builtins(one) for _, one in sorted(self.desired.items())],
            "demand": {base: _shown(demand) for base, demand in sorted(self._watched.demands.items())},
        }

    def _bases(self) -> set[Fingerprint]:
        served = {m.beat.base for m in self._members.all() if m.beat.kind == "engine" and m.health != "dead"}
        return {base for base in served if base} | set(self.desired)

    def _known(self) -> set[Fingerprint]:
        """Also those that requests come for and nobody serves, and those that any leader has left without engines."""
        return self._bases() | set(self._watched.demands) | set(self._asleep)

    async def _look(self) -> dict[Fingerprint, Value[Desired]]:
        orders = await self._store.get(keys.SCALE, dict[str, int])
        self._by_hand = orders.value if orders else {}
        asleep = await self._store.get(keys.ASLEEP, dict[Fingerprint, str])
        self._asleep = asleep.value if asleep else {}
        wanted = sorted(self._known())
        found = await self._store.get_many([keys.desired(base) for base in wanted], Desired)
        read = {base: value for base, value in zip(wanted, found, strict=True) if value}
        self.desired |= {base: value.value for base, value in read.items()}  # what is gone was lost, never taken back
        self._measure()
        return read

    async def _scale(self, base: Fingerprint, read: Value[Desired] | None, epoch: int) -> None:
        there: _There = {"engines": self._engines(base), "groups": self._groups(base)}
        before = read.value if read else await self._adopt(base, there, epoch)
        if before is None or before.epoch > epoch:
            return
        if before.engines and _is_to_come(there["engines"]):
            self._watched.demand(base).awaited()
        wanted = self._wanted(base)
        counts: dict[TierName, int] = {}
        why: dict[TierName, str] = {}
        draining: set[str] = set()
        for tier in TIERS:
            leaving = set(before.draining) & set(there[tier])
            decision = self._decide(base, before, tier, wanted[tier], leaving)
            taken = Step(decision.num, frozenset())  # nobody would end what was drained
            if self._backend is not None:
                holding = {name: _holding(member) for name, member in there[tier].items()}
                taken = step(before.count(tier), decision.num, holding, leaving)
            counts[tier], why[tier] = taken.num, decision.reason
            draining |= taken.draining
        after = msgspec.structs.replace(
            before,
            model=_model(there["engines"]) or before.model,
            epoch=epoch,
            group_shards=_shards(there["groups"]) or before.group_shards,
            draining=tuple(sorted(draining)),
            why=why,
            **counts,
        )
        if await self._write(after, read, epoch):  # who is to drain is read from there
            await self._note_sleep(after, there["engines"], epoch)
            await self._carry_out(after, epoch)

    def can_grow(self, base: Fingerprint) -> bool:
        """Whether more engines of a base may come: somebody follows the counts, and they are not at their ceiling."""
        desired = self.desired.get(base)
        return (
            self._backend is not None and desired is not None and desired.engines < self._sizing.bounds["engines"].most
        )

    async def _adopt(self, base: Fingerprint, there: _There, epoch: int) -> Desired | None:
        """What is there, or is still to come, when nothing has been decided yet is what should be.

        Where nobody is there: what was decided before the store lost it, or a base that sleeps would sleep for ever.
        """
        if not there["engines"]:
            return self.desired.get(base)
        desired = Desired(
            base=base,
            model=_model(there["engines"]),
            epoch=epoch,
            engines=len(there["engines"]),
            groups=len(there["groups"]),
            group_shards=_shards(there["groups"]) or 1,
        )
        try:
            told = await self._backend.present(desired) if self._backend else {}
        except InfiniLoraError as error:
            logger.warning("nothing is scaled yet", extra={"model": desired.model, "reason": error.message})
            return None
        return msgspec.structs.replace(desired, **{tier: max(count, len(there[tier])) for tier, count in told.items()})

    def _decide(
        self, base: Fingerprint, before: Desired, tier: TierName, wanted: Wanted, leaving: set[str]
    ) -> Decision:
        """One that leaves counts as gone: that was decided before."""
        key, count = (base, tier), before.count(tier)
        if key not in self._tiers:
            self._tiers[key] = Tier(self._sizing.bounds[tier])
        return self._tiers[key].decide(
            count - any(number_of(name) == count - 1 for name in leaving),
            wanted,
            self._clock(),
            by_hand=self._by_hand.get(by_hand(tier, before.model)),
            burns=tier == "engines" and self._alarms.misses_first_tokens(base),
        )

    def _wanted(self, base: Fingerprint) -> dict[TierName, Wanted]:
        """What the demand needs. A base that nobody can take requests for at all has whoever waits there."""
        demand, sizing = self._watched.demand(base), self._sizing
        is_idle = demand.idle_s >= sizing.idle_s
        in_flight, by_noise = demand.in_flight_ahead(), demand.in_flight_by_noise()
        share = self._share_with_adapter(base)
        by_load = for_load(in_flight * share, sizing.group_sequences, by_noise=by_noise * share, is_idle=is_idle)
        return {
            "engines": for_load(in_flight, sizing.engine_sequences, by_noise=by_noise, is_idle=is_idle),
            "groups": most_of(by_load, self._groups_wanted.get(base, Wanted(0, 0))),
        }

    def _share_with_adapter(self, base: Fingerprint) -> float:
        rate = self._watched.demand(base).rate
        return min(1.0, sum(self._rates(base).values()) / rate) if rate > 0 else 0.0

    def _rates(self, base: Fingerprint) -> dict[Digest, float]:
        adapters = self._reconciler.registry.adapters(base)
        return {digest: rps for digest, rps in self._reconciler.heat.recent.items() if digest in adapters}

    async def _count_groups(self) -> None:
        """Anew for each bucket, off the loop: the sums over all adapters take a moment."""
        for base in sorted(self._bases()):
            loads = [m.beat.load for m in self._groups(base).values()]
            sizes = [load.bytes_total for load in loads if isinstance(load, GroupLoad) and load.bytes_total]
            if sizes:
                self._group_bytes[base] = min(sizes)
            if base in self._group_bytes:
                asked = self._asked(base, self._watched.demand(base))
                self._groups_wanted[base] = await asyncio.to_thread(
                    for_bytes,
                    asked,
                    self._group_bytes[base] * self._sizing.fill,
                    iar=self._sizing.iar,
                    margin=MARGIN,
                    most=self._sizing.bounds["groups"].most,
                )

    def _asked(self, base: Fingerprint, demand: Demand) -> Asked:
        """The hottest adapters as they will be asked for: heat is by rank, so the first are the hottest."""
        adapters = self._reconciler.registry.adapters(base)
        hottest = list(self._rates(base).items())[:MOST_ADAPTERS]
        rates = np.array([rps for _, rps in hottest]) * demand.growth()
        sizes = np.array([adapters[digest].num_bytes for digest, _ in hottest], dtype=np.int64)
        return Asked(rates, sizes, demand.residence_s)

    def _measure(self) -> None:
        for desired in self.desired.values():
            for tier in TIERS:
                shown = self._reconciler.metrics.desired.labels(tier=tier, model=desired.model)
                shown.set(desired.count(tier))

    async def _write(self, after: Desired, read: Value[Desired] | None, epoch: int) -> bool:
        """False if another leads, or has written meanwhile: the next round reads what it wrote."""
        before = read.value if read else None
        if before == after:
            return True
        change = Change(keys.desired(after.base), read.raw if read else None, after)
        if not await self._store.swap([fence(epoch), change]):
            return False
        self.desired[after.base] = after
        for tier in TIERS:
            had = before.count(tier) if before else None
            if had != after.count(tier):
                numbers = {"had": had, "wanted": after.count(tier), "why": after.why[tier]}
                logger.info("scaled", extra={"tier": tier, "model": after.model, **numbers})
        return True

    async def _note_sleep(self, desired: Desired, engines: Mapping[str, Member], epoch: int) -> None:
        """A base sleeps from the day on which it is to have no engine, until one is ready."""
        was_asleep = desired.base in self._asleep
        is_awake = any(engine.beat.state == "ready" for engine in engines.values())
        is_asleep = not desired.engines or (was_asleep and not is_awake)
        if is_asleep == was_asleep:
            return
        found = await self._store.get(keys.ASLEEP, dict[Fingerprint, str])
        others = {base: model for base, model in (found.value if found else {}).items() if base != desired.base}
        after = others | ({desired.base: desired.model} if is_asleep else {})
        await self._store.swap([fence(epoch), Change(keys.ASLEEP, found.raw if found else None, after)])

    async def _carry_out(self, desired: Desired, epoch: int) -> None:
        """Again and again, should somebody else have set another number; at once when the counts have changed."""
        told, at = self._told.get(desired.base, (None, 0.0))
        now = self._clock()
        if self._backend is None or (told == desired and now - at < AGAIN_S):
            return
        try:
            await self._backend.apply(desired, lambda: self._leadership.holding == epoch)
            self._told[desired.base] = desired, now
        except InfiniLoraError as error:
            logger.warning("scaling is not carried out", extra={"model": desired.model, "reason": error.message})

    def _engines(self, base: Fingerprint) -> dict[str, Member]:
        return {name: m for name, m in self._reconciler.engines().items() if m.beat.base == base}

    def _groups(self, base: Fingerprint) -> dict[str, Member]:
        return {name: m for name, m in self._reconciler.heads().items() if m.beat.base == base}


def _holding(member: Member) -> Holding:
    load = member.beat.load
    if member.beat.state == "starting":
        return "starting"
    if isinstance(load, EngineLoad):
        is_free = member.beat.state == "draining" and not load.running and not load.waiting
        return "drained" if is_free else "busy"
    return "drained" if is_drained(member) else "busy"


def _is_to_come(engines: Mapping[str, Member]) -> bool:
    """Whether there is no engine yet: those that have come are ready, or drain."""
    return all(engine.beat.state == "starting" for engine in engines.values())


def _model(engines: Mapping[str, Member]) -> str:
    return next((member.beat.model for member in engines.values()), "")


def _shards(groups: Mapping[str, Member]) -> int:
    loads = (member.beat.load for member in groups.values())
    shapes = [load.shape.split("x") for load in loads if isinstance(load, GroupLoad)]
    return max((int(experts) * int(layers) for experts, layers in shapes), default=0)


def _shown(demand: Demand) -> dict[str, Any]:
    ahead = demand.ahead()
    return {
        "rps": round(demand.rate, 3),
        "residence_s": round(demand.residence_s, 3),
        "rps_ahead": round(ahead.count / demand.bucket_s, 3),
        "rps_ahead_at_most": round(ahead.upper / demand.bucket_s, 3),
        "method": ahead.method,
        "rises": ahead.rises,
        "in_flight_ahead": round(demand.in_flight_ahead(), 2),
        "idle_s": round(demand.idle_s, 1),
    }
