"""A pool of adapters in virtual time: the real slot table decides, loads take what the costs say."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import assert_never

from infinilora.engine.sched.scheduler import LeaseState
from infinilora.planner.simulate.costs import LoadCost
from infinilora.planner.simulate.timeline import Timeline
from infinilora.pool.slots import SlotTable
from infinilora.pool.tenancy import Drain, Limits, Place, Refuse, Slot, SlotState
from infinilora.protocol.ids import Digest

NUM_LAYERS = 2
"""As the table counts them: the first, after which rows can start, and all others."""

Tell = Callable[[str, Digest, LeaseState], None]
"""(holder, digest, what it may do now)."""


class SimPool:
    """One pool, of a group or of an engine. `moved_bytes` came into it, `fetched_bytes` of these from the store."""

    def __init__(  # noqa: PLR0913 - a pool is what it holds, how fast it loads, and whom it tells
        self,
        name: str,
        timeline: Timeline,
        load: LoadCost,
        sizes: dict[Digest, int],
        tell: Tell,
        *,
        pool_bytes: int,
        host_bytes: int,
        slots: int,
        limits: Limits | None = None,
    ) -> None:
        self.name = name
        self.is_alive = True
        self.moved_bytes = self.fetched_bytes = self.num_loads = 0
        self._timeline, self._load, self._sizes, self._tell = timeline, load, sizes, tell
        self._pool_bytes, self._host_bytes, self._num_slots, self._limits = pool_bytes, host_bytes, slots, limits
        self._host: OrderedDict[Digest, int] = OrderedDict()
        self._host_used = 0
        self._store_free_s = self._host_free_s = 0.0
        self._life = self._first_generation = 0
        self._alarm_s: float | None = None
        self.table = self._new_table()

    # What is asked of it ---------------------------------------------------------------------------

    def warm_host(self, digests: list[Digest]) -> None:
        """Have these in host memory, the last as the latest used, as far as they fit."""
        for digest in digests:
            self._keep(digest)

    def warm_pool(self, digests: list[Digest]) -> None:
        """Have these in the pool, from the first on, as far as they fit; none counts as loaded."""
        now = self._timeline.now
        for digest in digests:
            self.table.stage(digest)
            self.table.sized(digest, num_bytes=self._sizes[digest], num_layers=NUM_LAYERS, now=now)
            if not isinstance(self.table.decide(now), Place):
                self.table.evict(digest)
                return
            slot = self.table.place(digest, now)
            self.table.layers_ready(slot.index, slot.slot_generation, NUM_LAYERS, now)
            self._keep(digest)

    def lease(self, holder: str, digest: Digest) -> LeaseState:
        """Ask for a lease; what comes of it later is told."""
        now = self._timeline.now
        slot = self.table.lease(holder, digest, now)
        if slot is not None:
            return state_of(slot)
        self.table.sized(digest, num_bytes=self._sizes[digest], num_layers=NUM_LAYERS, now=now)
        self._turn()
        placed = self.table.slot_of(digest)
        return LeaseState.NO_SLOT if placed is None else state_of(placed)

    def release(self, holder: str, digest: Digest) -> None:
        self.table.release(holder, digest, self._timeline.now)
        self._turn()

    def stage(self, digest: Digest) -> None:
        """A hint."""
        self.table.stage(digest)
        self.table.sized(digest, num_bytes=self._sizes[digest], num_layers=NUM_LAYERS, now=self._timeline.now)
        self._turn()

    def evict(self, digest: Digest) -> None:
        """A hint."""
        self.table.evict(digest)
        self._turn()

    def die(self) -> list[tuple[str, Digest]]:
        """All is gone, the host's memory too. Who held or wanted what."""
        held = [(holder, s.digest) for s in self.table.slots if s.digest for holder in s.holders]
        held += [(holder, w.digest) for w in self.table.waiting.values() for holder in w.holders]
        self._host.clear()
        self._host_used = 0
        self._first_generation = max(s.slot_generation for s in self.table.slots)
        self._life += 1
        self.is_alive = False
        self.table = self._new_table()
        return sorted(held)

    def rise(self) -> None:
        """A new life, empty."""
        self.is_alive = True

    @property
    def num_leases(self) -> int:
        return self.table.num_leases

    # What it does by itself ------------------------------------------------------------------------

    def _new_table(self) -> SlotTable:
        return SlotTable(
            num_slots=self._num_slots,
            capacity_bytes=self._pool_bytes,
            limits=self._limits,
            first_generation=self._first_generation,
        )

    def _turn(self) -> None:
        """Do what the table decides, as long as it decides anything."""
        table, now = self.table, self._timeline.now
        while decision := table.decide(now):
            match decision:
                case Drain():
                    table.emptied(decision.slot, decision.slot_generation)
                case Place():
                    self._begin_load(table.place(decision.digest, now), decision.digest)
                case Refuse():
                    for holder in table.refuse(decision.digest):
                        self._tell(holder, decision.digest, LeaseState.FAILED)
                case _:
                    assert_never(decision)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Waiting ages though nothing happens."""
        deadline = self.table.next_deadline(self._timeline.now)
        if deadline is None or (self._alarm_s is not None and self._timeline.now < self._alarm_s <= deadline):
            return
        self._alarm_s = deadline
        self._timeline.at(deadline, self._turn)

    def _begin_load(self, slot: Slot, digest: Digest) -> None:
        first_s, last_s = self._load_times(digest, slot.num_bytes)
        life, generation = self._life, slot.slot_generation
        for holder in sorted(slot.holders):
            self._tell(holder, digest, LeaseState.LOADING)
        for count, when_s in ((1, first_s), (NUM_LAYERS, last_s)):
            if count == NUM_LAYERS or first_s < last_s:
                self._timeline.at(when_s, partial(self._arrived, life, slot, generation, count))

    def _load_times(self, digest: Digest, num_bytes: int) -> tuple[float, float]:
        """When the first layer and when all are there. Both pipes work on different adapters at once."""
        cost, ready_s = self._load, self._timeline.now + self._load.latency_s.value
        begun_s = ready_s
        if digest not in self._host:
            begun_s = max(ready_s, self._store_free_s)
            self._store_free_s = ready_s = begun_s + num_bytes / cost.store_bytes_per_s.value
            self.fetched_bytes += num_bytes
        self._keep(digest)
        stage_s = num_bytes / cost.host_bytes_per_s.value
        self._host_free_s = last_s = max(ready_s, self._host_free_s + stage_s, begun_s + stage_s)
        self.moved_bytes += num_bytes
        self.num_loads += 1
        first_s = max(begun_s, last_s - max(stage_s, ready_s - begun_s) * (1.0 - cost.first_layer_share.value))
        return first_s, last_s

    def _keep(self, digest: Digest) -> None:
        """In host memory, the longest unused going first."""
        self._host_used += self._sizes[digest] - self._host.pop(digest, 0)
        self._host[digest] = self._sizes[digest]
        while self._host_used > self._host_bytes:
            self._host_used -= self._host.popitem(last=False)[1]

    def _arrived(self, life: int, slot: Slot, generation: int, count: int) -> None:
        if life != self._life or self.table.layers_ready(slot.index, generation, count, self._timeline.now) is None:
            return
        assert slot.digest is not None  # noqa: S101 - a slot that is not empty
        for holder in sorted(slot.holders):
            self._tell(holder, slot.digest, state_of(slot))
        self._turn()


def state_of(slot: Slot) -> LeaseState:
    if slot.state is SlotState.READY:
        return LeaseState.READY
    return LeaseState.ADMISSIBLE if slot.layers_ready else LeaseState.LOADING
