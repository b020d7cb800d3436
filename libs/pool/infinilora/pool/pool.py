"""The adapter pool: leases, slots, memory, loading and kernels as one thing. Thread-safe.

Used by the lora-server, a holder for each link, and by the engine's local mode, with one holder. This is the door: it
locks, tells the time, and has what was decided carried out before it lets go. What happens is in `tenancies.Tenancies`.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from infinilora.pool.config import PoolConfig, PoolKernels, PoolLoad
from infinilora.pool.execute import Grants
from infinilora.pool.group import OtherShards
from infinilora.pool.holders import Holders, LeaseState, OnChange
from infinilora.pool.loader import Lanes, Loader, Target
from infinilora.pool.memory import SlotMemory
from infinilora.pool.pace import Pace
from infinilora.pool.retire import RetireQueue
from infinilora.pool.scales import SiteScale
from infinilora.pool.tenancies import Tenancies
from infinilora.pool.tenancy import SlotState
from infinilora.pool.watch import NoWatch, PoolWatch
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.ids import Digest
from infinilora.runtime.blob_store import BlobStore
from infinilora.weights.packed import PackedHeader

__all__ = ["AdapterPool", "LeaseState", "OnChange", "PoolConfig", "PoolKernels", "PoolLoad"]

logger = logging.getLogger(__name__)


class AdapterPool:
    """Between calls every decision of the table has been carried out, but for loads that are still stopping."""

    def __init__(
        self,
        config: PoolConfig,
        blobs: BlobStore,
        kernels: PoolKernels,
        *,
        on_death: Callable[[BaseException], None],
        watch: PoolWatch | None = None,
        others: OtherShards | None = None,
    ) -> None:
        """`others`: of the group that this pool is the head of."""
        self.kernels = kernels
        self.device = config.device
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._memory = SlotMemory(config, others)
        self._retiring = RetireQueue(on_death)
        self._holders = Holders(self._retiring, config.device, self._note_step)
        self._is_closed = False
        self._tiers = config.tiers(blobs)
        lanes = Lanes(near=config.loader_threads, far=config.fetch_threads)
        self._pace = Pace(config.load_share)
        self._loader = Loader(
            self._tiers, kernels, self, lanes=lanes, on_death=on_death, pace=self._pace, device=config.device
        )
        self._tenancies = Tenancies(
            config, kernels, self._memory, self._loader, self._holders, hold=self._hold, watch=watch or NoWatch()
        )
        self._table = self._tenancies.table
        self._failures = self._tenancies.failures
        self._on_death = on_death
        self._timer = threading.Thread(target=self._keep_time, name="pool-timer", daemon=True)
        self._timer.start()

    # For holders ---------------------------------------------------------------------------------

    def grants(self, holder: str) -> Grants:
        """What `execute` may compute with for this holder."""
        with self._lock:
            return self._holders.grants(holder)

    def lease(self, holder: str, digest: Digest, on_change: OnChange) -> None:
        """Ask for a lease; returns at once. `on_change` is told of it, now if it can be granted now. Idempotent."""
        now = time.monotonic()
        with self._lock:
            if error := self._failures.known(digest, now):
                on_change(LeaseState(digest, error=error))
                return
            try:
                slot = self._table.lease(holder, digest, now)
            except InfiniLoraError as error:
                on_change(LeaseState(digest, error=error))
                return
            self._holders.listen(holder, digest, on_change)
            if slot:
                self._tenancies.tell(slot, only=holder)
            else:
                self._loader.want(digest)
            self._carry_out(now)

    def release(self, holder: str, digest: Digest) -> None:
        """Give a lease up, or the wait for it. Waits for an execution of this holder that is running now."""
        now = time.monotonic()
        with self._lock:
            self._tenancies.release(holder, digest, now)
            self._carry_out(now)

    def drop(self, holder: str) -> None:
        """The holder is gone, and all it held with it."""
        now = time.monotonic()
        with self._lock:
            for digest in self._table.held_by(holder):
                self._tenancies.release(holder, digest, now)
            self._holders.gone(holder)
            self._carry_out(now)

    # For the coordinator: hints, and the hand controls ---------------------------------------------

    def stage(self, digest: Digest, over: Iterable[Digest] = ()) -> None:
        """A hint: have it resident. `over`: hints of before that hold no more."""
        now = time.monotonic()
        with self._lock:
            if self._failures.known(digest, now) is None:
                self._tenancies.leaving.discard(digest)
                for earlier in over:
                    self._table.unhint(earlier)
                self._table.stage(digest)
                self._tenancies.want_waiting(digest)
                self._carry_out(now)

    def evict(self, digest: Digest) -> None:
        with self._lock:
            self._tenancies.evict(digest)
            self._carry_out(time.monotonic())

    def forget(self, digest: Digest) -> None:
        """It is deleted: once nobody leases it, its slot and its copies in every tier of this host go, and its faults.

        Returns at once. A later `stage` or `pin` takes it back. Idempotent.
        """
        with self._lock:
            self._table.pin(digest, pinned=False)
            self._failures.forgive(digest)
            self._tenancies.leaving.add(digest)
            self._tenancies.evict(digest)
            self._carry_out(time.monotonic())

    def registered(self, digest: Digest) -> None:
        """A name leads to it from now on: what has failed before says nothing of the next attempt."""
        with self._lock:
            self._failures.forgive(digest)

    def pin(self, digest: Digest, *, pinned: bool) -> None:
        with self._lock:
            if pinned:
                self._tenancies.leaving.discard(digest)
            self._table.pin(digest, pinned=pinned)
            self._tenancies.want_waiting(digest)
            self._carry_out(time.monotonic())

    def drain(self, *, draining: bool) -> None:
        """Grant no new lease (or do again). Leases in force stay."""
        with self._lock:
            self._table.is_draining = draining
            self._carry_out(time.monotonic())

    # What is so ----------------------------------------------------------------------------------

    def holds(self, holder: str) -> bool:
        """Whether the holder leases, or waits for, anything."""
        with self._lock:
            return bool(self._table.held_by(holder))

    @property
    def capacity_bytes(self) -> int:
        return self._table.capacity_bytes

    def size_of(self, digest: Digest) -> int | None:
        """Bytes that it takes, or would take, of the pool; None while its manifest has not been read."""
        with self._lock:
            return self._table.size_of(digest)

    def resident(self) -> tuple[Digest, ...]:
        with self._lock:
            return self._table.resident()

    def load(self) -> PoolLoad:
        with self._lock:
            return PoolLoad(
                bytes_total=self._table.capacity_bytes,
                bytes_free=self._table.free_bytes,
                leases=self._table.num_leases,
                waiting=sum(len(w.holders) for w in self._table.waiting.values()),
                resident=self._table.resident(),
                loading=self._table.loading(),
                failed=self._failures.told(),
                pinned=tuple(sorted(self._table.pins)),
            )

    def sweep(self) -> int:
        """As `Tiers.sweep`: blocking, and for as long as the store takes."""
        return self._tiers.sweep()

    def tier_bytes(self) -> dict[str, int]:
        """What the tiers below the pool hold, by name."""
        return self._tiers.used_bytes()

    def check(self) -> None:
        """Raise AssertionError where books and memory disagree. `check_idle` for a pool that nobody uses."""
        with self._lock:
            self._table.check()
            self._memory.check({s.index for s in self._table.slots if s.state is not SlotState.EMPTY})

    def check_idle(self) -> None:
        """`check`, and raise AssertionError if a lease, a wait or a load is left."""
        self.check()
        with self._lock:
            assert not self._table.waiting, list(self._table.waiting)
            assert self._table.num_leases == 0
        assert self._loader.num_loads == 0

    def close(self) -> None:
        """Stop all threads. Holders are told nothing more."""
        with self._lock:
            self._is_closed = True
            self._wake.notify_all()
        self._timer.join()
        self._loader.close()
        self._retiring.close()
        self._tiers.close()

    # From the step threads of holders ---------------------------------------------------------------

    def _note_step(self, slots: Iterable[int]) -> None:
        """A step of these slots begins. If one of them is resident, loads go slowly until no more such steps come.

        Takes no lock: a slot that changes its state now may count as either.
        """
        known = self._table.slots
        if any(known[slot].state is SlotState.READY for slot in slots if 0 <= slot < len(known)):
            self._pace.stepped(time.monotonic())

    # From the loader's threads -------------------------------------------------------------------

    def sized(self, digest: Digest, header: PackedHeader) -> None:
        now = time.monotonic()
        with self._lock:
            self._tenancies.sized(digest, header, now)
            self._carry_out(now)

    def layer_ready(self, target: Target, count: int, tier: str) -> None:
        with self._lock:
            now = time.monotonic()
            if self._tenancies.layer_ready(target, count, tier, now):
                self._carry_out(now)

    def failed(self, digest: Digest, error: InfiniLoraError) -> None:
        now = time.monotonic()
        with self._lock:
            self._tenancies.failed(digest, error, now)
            self._carry_out(now)

    def stopped(self, target: Target) -> None:
        with self._lock:
            self._tenancies.empty(target.slot, target.slot_generation)
            self._carry_out(time.monotonic())

    # From the retire queue -----------------------------------------------------------------------

    def _hold(self, slot: int, slot_generation: int) -> bool:
        """Under the lock."""
        return self._retiring.hold(slot, partial(self._retired, slot, slot_generation))

    def _retired(self, slot: int, slot_generation: int) -> None:
        with self._lock:
            self._tenancies.clear(slot, slot_generation)
            self._carry_out(time.monotonic())

    # From the other shards of a group, whose head this is ------------------------------------------

    def shard_ready(
        self, shard: int, slot: int, slot_generation: int, count: int, *, scales: Sequence[SiteScale], tier: str
    ) -> None:
        """Layers 0..count-1 of a tenancy are there on that shard. `scales`: those it has read since it last said so."""
        with self._lock:
            now = time.monotonic()
            if self._tenancies.shard_ready(shard, slot, slot_generation, count, scales=scales, tier=tier, now=now):
                self._carry_out(now)

    def shard_failed(self, slot: int, slot_generation: int, error: InfiniLoraError) -> None:
        """A shard cannot have its part of what was to be in a slot: nobody has the adapter then."""
        with self._lock:
            digest = self._table.digest_at(slot, slot_generation)
            if digest is not None:
                now = time.monotonic()
                self._tenancies.failed(digest, error, now)
                self._carry_out(now)

    def shard_emptied(self, shard: int, slot: int, slot_generation: int) -> None:
        """That shard computes with the tenancy no more, and its memory is free."""
        with self._lock:
            self._tenancies.emptied(shard, slot, slot_generation)
            self._carry_out(time.monotonic())

    # The time ------------------------------------------------------------------------------------

    def _carry_out(self, now: float) -> None:
        """Under the lock, last: have the table's decisions carried out, and the timer look at what is left to do."""
        self._tenancies.carry_out(now)
        if self._table.waiting or self._tenancies.gone:
            self._wake.notify_all()

    def _keep_time(self) -> None:
        """Let the table decide at its deadlines, and empty the tiers of what has left: disks are slow, locks short."""
        try:
            while (gone := self._wait()) is not None:
                for digest in gone:
                    self._tiers.forget(digest)
                    self._memory.forget(digest)
                    logger.info("adapter forgotten", extra={"adapter_id": digest})
        except BaseException as error:
            self._on_death(error)
            raise

    def _wait(self) -> set[Digest] | None:
        """What is to leave the tiers now (maybe nothing); None once the pool is closed."""
        with self._wake:
            if not self._tenancies.gone and not self._is_closed:
                now = time.monotonic()
                deadline = self._table.next_deadline(now)
                self._wake.wait(None if deadline is None else max(0.0, deadline - now))
            if self._is_closed:
                return None
            if self._table.waiting:
                self._carry_out(time.monotonic())
            gone, self._tenancies.gone = self._tenancies.gone, set()
            return gone
