"""Where engines' leases are asked for: the engine's own pool, a group's, or both. The choice is the services' own."""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from infinilora.engine.lora.choose import Group, choose_group
from infinilora.engine.lora.hottest import Warmth, choose_hottest
from infinilora.engine.sched.scheduler import LeaseState
from infinilora.planner.simulate.engine import EngineLeases
from infinilora.planner.simulate.pool import SimPool
from infinilora.planner.simulate.pricing import OWN
from infinilora.planner.simulate.timeline import Timeline
from infinilora.pool.evict import Heat
from infinilora.protocol.ids import Digest

LEAST_HEAT = 1.5 * 0.6931471805599453 / 60.0
"""As an engine's: asked for twice within a half-life of 60 s."""
MOST_KNOWN = 256
"""As an engine's: adapters that its choice of the hottest is made of."""


class Desk:
    """One engine's asking. `homes`: digest -> the group that was asked, OWN its own pool."""

    def __init__(
        self,
        engine: str,
        timeline: Timeline,
        own: SimPool | None,
        groups: Mapping[str, SimPool],
        *,
        lease_s: float,
        sizes: Mapping[Digest, int],
        placed: Callable[[Digest], frozenset[str] | None],
        heard: Callable[[str, Digest], None],
    ) -> None:
        self.homes: dict[Digest, str] = {}
        self.beats: list[Group] = []
        self.leases = EngineLeases(self._ask, self._give_up)
        self._engine, self._timeline, self._own, self._groups = engine, timeline, own, groups
        self._lease_s, self._sizes, self._placed, self._heard = lease_s, sizes, placed, heard
        self._heat = Heat()
        self._known: OrderedDict[Digest, None] = OrderedDict()
        self._orphans: set[Digest] = set()
        self._hottest: frozenset[Digest] = frozenset()

    def beat(self, groups: list[Group]) -> None:
        """What the groups' last heartbeats said. Whoever found none before asks again."""
        self.beats = groups
        orphans, self._orphans = sorted(self._orphans), set()
        for digest in orphans:
            self._ask_group(digest)

    def told(self, pool: str, digest: Digest, state: LeaseState) -> None:
        """By a pool. What is no longer wanted of it is old news."""
        if self.homes.get(digest) == pool and digest in self.leases.wanted:
            self.leases.views[digest] = state
            self._heard(self._engine, digest)

    def lost(self, pool: str, digest: Digest, retry_s: float) -> None:
        """The pool has died."""
        if self.homes.get(digest) != pool:
            return
        del self.homes[digest]
        self.leases.views[digest] = LeaseState.NO_SLOT
        self._heard(self._engine, digest)
        self._timeline.at(self._timeline.now + retry_s, lambda: self._ask_group(digest))

    def group_of(self, digest: Digest) -> str:
        return self.homes.get(digest, OWN)

    def _ask(self, digest: Digest) -> None:
        if self._own is not None and (not self._groups or self._is_here(digest)):
            self.homes[digest] = OWN
            self.leases.views[digest] = self._own.lease(self._engine, digest)
        else:
            self._timeline.at(self._timeline.now + self._lease_s, lambda: self._ask_group(digest))

    def _give_up(self, digest: Digest) -> None:
        home = self.homes.pop(digest, None)
        pool = self._own if home == OWN else self._groups[home] if home is not None else None
        if pool is not None:
            pool.release(self._engine, digest)

    def _ask_group(self, digest: Digest) -> None:
        if digest not in self.leases.wanted or digest in self.homes:
            return
        there = [group for group in self.beats if self._groups[group.name].is_alive]
        name = choose_group(digest, there, self._placed(digest))
        if name is None:
            self._orphans.add(digest)
            return
        self.homes[digest] = name
        self.leases.views[digest] = self._groups[name].lease(self._engine, digest)
        self._heard(self._engine, digest)

    def _is_here(self, digest: Digest) -> bool:
        """Hybrid: whether it is among the hottest and resident; whoever becomes one is brought in by a hint."""
        own, now = self._own, self._timeline.now
        assert own is not None  # noqa: S101 - asked of hybrid engines only
        self._heat.warm(digest, now)
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        warmths = [Warmth(d, self._heat.of(d, now), self._sizes[d]) for d in self._known]
        capacity = own.table.capacity_bytes
        chosen = choose_hottest(warmths, self._hottest, capacity_bytes=capacity, least_heat=LEAST_HEAT)
        for gone in sorted(self._hottest - chosen):
            own.evict(gone)
        for new in sorted(chosen - self._hottest):
            own.stage(new)
        self._hottest = chosen
        return digest in own.table.resident() and digest in chosen
