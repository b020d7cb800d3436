"""The adapter pool: leases, slots, memory, loading and kernels as one thing. Thread-safe.

Used by the lora-server, a holder for each link, and by the engine's local mode, with one holder. It decides nothing
itself: `slots.SlotTable` does; this file carries decisions out and tells holders.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from infinilora.pool.backoff import RETRY_S, Failures
from infinilora.pool.cache import DiskCache
from infinilora.pool.device import Device, HostDevice
from infinilora.pool.execute import Grants, SiteKernels
from infinilora.pool.group import OtherShards
from infinilora.pool.holders import Holders, LeaseState, OnChange
from infinilora.pool.host import HostTier
from infinilora.pool.loader import Binder, Lanes, Loader, Target
from infinilora.pool.pace import Pace
from infinilora.pool.pages import PageArena, Run
from infinilora.pool.retire import RetireQueue
from infinilora.pool.scales import AdapterScales, SiteScale
from infinilora.pool.share import Share
from infinilora.pool.slots import SlotTable
from infinilora.pool.tenancy import Drain, Limits, Place, Refuse, Slot, SlotState
from infinilora.pool.tiers import Tiers
from infinilora.pool.watch import NoWatch, PoolWatch
from infinilora.protocol.adapter import Manifest
from infinilora.protocol.control import LoadFailure
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.protocol.shards import HEAD
from infinilora.runtime.blob_store import BlobStore
from infinilora.weights.packed import PackedHeader

__all__ = ["AdapterPool", "LeaseState", "OnChange", "PoolConfig", "PoolKernels", "PoolLoad"]

logger = logging.getLogger(__name__)


class PoolKernels(Binder, SiteKernels, Protocol):
    """What the pool needs of `kernels.SlotKernels`."""

    def clear(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How large a pool is and where it reads. `num_layers` is the base's, without lm_head.

    `cache_dir` may be shared with other processes. `host_bytes`: 0 for no tier in host memory, which on a CPU would
    only hold twice what the pool and the page cache hold already. Threads: `loader_threads` for what this host has,
    `fetch_threads` for what waits for the store.
    """

    base: Fingerprint
    num_layers: int
    capacity_bytes: int
    num_slots: int
    cache_dir: Path
    cache_bytes: int
    host_bytes: int = 0
    loader_threads: int = 2
    fetch_threads: int = 4
    load_share: float = 1.0
    """Of one core, for all loads together, while rows of resident adapters are served; 1: loads never wait."""
    device: Device = field(default_factory=HostDevice)
    retry_s: float = RETRY_S
    """How long an adapter that failed is left alone at first (backoff.py)."""
    limits: Limits = field(default_factory=Limits)
    share: Share | None = None
    """What of each adapter this process holds, as a shard of a group; None: all of it."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """How full the pool is, and how each adapter that it has to do with fares. `loading`: or waiting for room."""

    bytes_total: int
    bytes_free: int
    leases: int
    waiting: int
    resident: tuple[Digest, ...]
    loading: tuple[Digest, ...] = ()
    failed: tuple[LoadFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the pool needs to know of an adapter that waits or has a slot. `layer_bytes`: what this process holds."""

    manifest: Manifest
    layer_bytes: tuple[int, ...]
    layer_sites: tuple[int, ...]
    scales: AdapterScales


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
        self._config = config
        self._others = others
        self._watch = watch or NoWatch()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._arena = PageArena(config.capacity_bytes, memory=config.device.allocate(config.capacity_bytes))
        self._table = SlotTable(
            num_slots=config.num_slots,
            capacity_bytes=self._arena.capacity_bytes,
            limits=config.limits,
            # A plan made for an earlier life of this process must not fit a tenancy of this one.
            first_generation=secrets.randbits(30),
        )
        self._runs: dict[int, tuple[Run, ...]] = {}
        self._wanted: dict[Digest, _Wanted] = {}
        self._retiring = RetireQueue(on_death)
        self._holders = Holders(self._retiring, config.device, self._note_step)
        self._failures = Failures(config.retry_s)
        self._leaving: set[Digest] = set()
        self._gone: set[Digest] = set()
        self._is_closed = False
        self._tiers = tiers_of(config, blobs)
        lanes = Lanes(near=config.loader_threads, far=config.fetch_threads)
        self._pace = Pace(config.load_share)
        self._loader = Loader(
            self._tiers, kernels, self, lanes=lanes, on_death=on_death, pace=self._pace, device=config.device
        )
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
                self._tell(slot, only=holder)
            else:
                self._loader.want(digest)
            self._carry_out(now)

    def release(self, holder: str, digest: Digest) -> None:
        """Give a lease up, or the wait for it. Waits for an execution of this holder that is running now."""
        now = time.monotonic()
        with self._lock:
            self._release(holder, digest, now)
            self._carry_out(now)

    def drop(self, holder: str) -> None:
        """The holder is gone, and all it held with it."""
        now = time.monotonic()
        with self._lock:
            for digest in self._table.held_by(holder):
                self._release(holder, digest, now)
            self._holders.gone(holder)
            self._carry_out(now)

    # For the coordinator: hints, and the hand controls ---------------------------------------------

    def stage(self, digest: Digest) -> None:
        now = time.monotonic()
        with self._lock:
            if self._failures.known(digest, now) is None:
                self._leaving.discard(digest)
                self._table.stage(digest)
                self._want_waiting(digest)
                self._carry_out(now)

    def evict(self, digest: Digest) -> None:
        with self._lock:
            self._evict(digest)
            self._carry_out(time.monotonic())

    def forget(self, digest: Digest) -> None:
        """It is deleted: once nobody leases it, its slot and its copies in every tier of this host go, and its faults.

        Returns at once. A later `stage` or `pin` takes it back. Idempotent.
        """
        with self._lock:
            self._table.pin(digest, pinned=False)
            self._failures.forgive(digest)
            self._leaving.add(digest)
            self._evict(digest)
            self._carry_out(time.monotonic())

    def registered(self, digest: Digest) -> None:
        """A name leads to it from now on: what has failed before says nothing of the next attempt."""
        with self._lock:
            self._failures.forgive(digest)

    def pin(self, digest: Digest, *, pinned: bool) -> None:
        with self._lock:
            if pinned:
                self._leaving.discard(digest)
            self._table.pin(digest, pinned=pinned)
            self._want_waiting(digest)
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
            )

    def tier_bytes(self) -> dict[str, int]:
        """What the tiers below the pool hold: `disk` (of all processes that share the directory) and `host`."""
        host = self._tiers.host
        return {"disk": self._tiers.cache.used_bytes, "host": host.used_bytes if host else 0}

    def check(self) -> None:
        """Raise AssertionError where books and memory disagree. `check_idle` for a pool that nobody uses."""
        with self._lock:
            self._table.check()
            self._arena.check(run for runs in self._runs.values() for run in runs)
            in_use = {s.index for s in self._table.slots if s.state is not SlotState.EMPTY}
            assert set(self._runs) == in_use, (set(self._runs), in_use)

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
            if digest not in self._table.waiting:
                # Staged: news of an earlier load, overtaken by a later one. Else nobody wants it any more.
                if self._table.slot_of(digest) is None:
                    self._loader.cancel(digest)
                return
            if error := self._misfit(digest, header):
                self._loader.cancel(digest)
                self._lose(digest, error, now)
            else:
                self._wanted[digest] = wanted = _wanted(header, self._config.share, self._others)
                cost = self._arena.cost(wanted.layer_bytes)
                if self._others:  # a slot takes what it takes of the fullest shard
                    cost = max(cost, self._others.cost(header.manifest))
                self._table.sized(digest, num_bytes=cost, num_layers=self._num_layers, now=now)
            self._carry_out(now)

    def layer_ready(self, target: Target, count: int, tier: str) -> None:
        with self._lock:
            digest = self._table.digest_at(target.slot, target.slot_generation)
            if digest is None:
                return
            self._wanted[digest].scales.read(count - 1, target.layers[count - 1])
            if self._others:
                count = self._others.layers_ready(HEAD, target.slot, target.slot_generation, count)
            self._advance(target.slot, target.slot_generation, count, tier)

    def _advance(self, index: int, slot_generation: int, count: int, tier: str) -> None:
        """Layers 0..count-1 of a tenancy are there, on every shard. Under the lock."""
        now = time.monotonic()
        slot = self._table.layers_ready(index, slot_generation, count, now)
        if slot is not None and count:
            self._tell(slot)
            if slot.state is SlotState.READY:
                assert slot.digest is not None
                extra = {"adapter_id": slot.digest, "slot": slot.index, "staged_s": round(slot.reload_s, 4)}
                logger.info("adapter resident", extra=extra | {"tier": tier})
                self._watch.loaded(tier, slot.reload_s)
                self._failures.forgive(slot.digest)
                self._carry_out(now)

    def failed(self, digest: Digest, error: InfiniLoraError) -> None:
        now = time.monotonic()
        with self._lock:
            self._watch.load_failed(error.code)
            self._lose(digest, error, now)
            self._carry_out(now)

    def stopped(self, target: Target) -> None:
        with self._lock:
            self._empty(target.slot, target.slot_generation)
            self._carry_out(time.monotonic())

    # From the retire queue -----------------------------------------------------------------------

    def _retired(self, slot: int, slot_generation: int) -> None:
        with self._lock:
            self._clear(slot, slot_generation)
            self._carry_out(time.monotonic())

    # From the other shards of a group, whose head this is ------------------------------------------

    def shard_ready(
        self, shard: int, slot: int, slot_generation: int, count: int, *, scales: Sequence[SiteScale], tier: str
    ) -> None:
        """Layers 0..count-1 of a tenancy are there on that shard. `scales`: those it has read since it last said so."""
        assert self._others is not None
        with self._lock:
            digest = self._table.digest_at(slot, slot_generation)
            if digest is None:
                return
            for scale in scales:
                self._wanted[digest].scales.put(scale)
            self._advance(slot, slot_generation, self._others.layers_ready(shard, slot, slot_generation, count), tier)

    def shard_failed(self, slot: int, slot_generation: int, error: InfiniLoraError) -> None:
        """A shard cannot have its part of what was to be in a slot: nobody has the adapter then."""
        with self._lock:
            digest = self._table.digest_at(slot, slot_generation)
            if digest is not None:
                self._watch.load_failed(error.code)
                now = time.monotonic()
                self._lose(digest, error, now)
                self._carry_out(now)

    def shard_emptied(self, shard: int, slot: int, slot_generation: int) -> None:
        """That shard computes with the tenancy no more, and its memory is free."""
        assert self._others is not None
        with self._lock:
            if self._others.emptied(shard, slot, slot_generation):
                self._vacate(slot, slot_generation)
            self._carry_out(time.monotonic())

    # Under the lock ------------------------------------------------------------------------------

    @property
    def _num_layers(self) -> int:
        """lm_head counts as a layer, the last."""
        return self._config.num_layers + 1

    def _carry_out(self, now: float) -> None:
        """Do what the table decides until it has nothing more to say."""
        while decision := self._table.decide(now):
            match decision:
                case Drain():
                    self._drain(decision)
                case Place():
                    self._place(decision, now)
                case Refuse():
                    self._loader.cancel(decision.digest)
                    self._wanted.pop(decision.digest, None)
                    if isinstance(decision.error, AdapterFailed):  # not of this moment: it fits no better later
                        self._note_failure(decision.digest, decision.error, now)
                    self._holders.lose(self._table.refuse(decision.digest), decision.digest, decision.error)
        for digest in [d for d in self._leaving if not self._has(d)]:
            self._leaving.remove(digest)
            self._gone.add(digest)
        if self._table.waiting or self._gone:
            self._wake.notify_all()

    def _has(self, digest: Digest) -> bool:
        """Whether it waits, has a slot, or has one that is still being emptied."""
        return digest in self._table.waiting or any(slot.digest == digest for slot in self._table.slots)

    def _evict(self, digest: Digest) -> None:
        self._table.evict(digest)
        if digest not in self._table.waiting and self._table.slot_of(digest) is None:
            self._loader.cancel(digest)

    def _place(self, decision: Place, now: float) -> None:
        digest = decision.digest
        wanted = self._wanted[digest]
        runs = self._arena.allocate(wanted.layer_bytes)
        if runs is not None and self._others and not self._others.allocate(digest, wanted.manifest):
            self._arena.free(runs)
            runs = None
        if runs is None:
            self._table.no_room(digest)
            return
        slot = self._table.place(digest, now)
        if self._others:
            self._others.stage(digest, slot.index, slot.slot_generation)
        self._runs[slot.index] = runs
        self._tell(slot)
        target = Target(slot.index, slot.slot_generation, tuple(run.data for run in runs))
        self._loader.stage(digest, target)

    def _drain(self, drain: Drain) -> None:
        self._watch.drained()
        self._wanted.pop(drain.digest, None)
        if self._others:
            self._others.empty(drain.slot, drain.slot_generation)
        if self._loader.cancel(drain.digest):
            self._empty(drain.slot, drain.slot_generation)

    def _empty(self, slot: int, slot_generation: int) -> None:
        """Now, or once all that was launched with the tenancy has run."""
        if not self._retiring.hold(slot, partial(self._retired, slot, slot_generation)):
            self._clear(slot, slot_generation)

    def _clear(self, slot: int, slot_generation: int) -> None:
        self.kernels.clear(slot)
        if self._others is None or self._others.emptied(HEAD, slot, slot_generation):
            self._vacate(slot, slot_generation)

    def _vacate(self, slot: int, slot_generation: int) -> None:
        """Nobody computes with the tenancy any more, on any shard."""
        self._arena.free(self._runs.pop(slot))
        self._table.emptied(slot, slot_generation)

    def _lose(self, digest: Digest, error: InfiniLoraError, now: float) -> None:
        self._note_failure(digest, error, now)
        slot = self._table.slot_of(digest)
        holders, drain = self._table.failed(digest)
        self._holders.lose(holders, digest, error, slot)
        self._wanted.pop(digest, None)
        if drain:
            self._drain(drain)

    def _note_failure(self, digest: Digest, error: InfiniLoraError, now: float) -> None:
        self._failures.note(digest, error, now, secrets.randbelow(1000) / 1000)

    def _release(self, holder: str, digest: Digest, now: float) -> None:
        slot = self._table.slot_of(digest)
        self._table.release(holder, digest, now)
        self._holders.forget(holder, digest, slot)
        if digest in self._leaving:
            self._table.evict(digest)
        if slot is None and digest not in self._table.waiting:
            self._loader.cancel(digest)
            self._wanted.pop(digest, None)

    def _tell(self, slot: Slot, *, only: str | None = None) -> None:
        assert slot.digest is not None
        wanted = self._wanted[slot.digest]
        self._holders.tell(slot, wanted.layer_sites, wanted.scales, only=only)

    def _want_waiting(self, digest: Digest) -> None:
        if digest in self._table.waiting:
            self._loader.want(digest)

    def _misfit(self, digest: Digest, header: PackedHeader) -> InfiniLoraError | None:
        found, wanted = header.manifest, self._config
        if found.base != wanted.base:
            return AdapterFailed(f"adapter {digest} is of base {found.base}; this pool serves {wanted.base}")
        if found.num_layers != wanted.num_layers:
            return AdapterFailed(f"adapter {digest} has {found.num_layers} layers, the base {wanted.num_layers}")
        return None

    def _keep_time(self) -> None:
        """Let the table decide at its deadlines, and empty the tiers of what has left: disks are slow, locks short."""
        try:
            while (gone := self._wait()) is not None:
                for digest in gone:
                    self._tiers.forget(digest)
                    if self._others:
                        self._others.forget(digest)
                    logger.info("adapter forgotten", extra={"adapter_id": digest})
        except BaseException as error:
            self._on_death(error)
            raise

    def _wait(self) -> set[Digest] | None:
        """What is to leave the tiers now (maybe nothing); None once the pool is closed."""
        with self._wake:
            if not self._gone and not self._is_closed:
                now = time.monotonic()
                deadline = self._table.next_deadline(now)
                self._wake.wait(None if deadline is None else max(0.0, deadline - now))
            if self._is_closed:
                return None
            if self._table.waiting:
                self._carry_out(time.monotonic())
            gone, self._gone = self._gone, set()
            return gone


def tiers_of(config: PoolConfig, blobs: BlobStore) -> Tiers:
    host = HostTier(config.host_bytes, is_pinned=not config.device.is_host) if config.host_bytes else None
    return Tiers(blobs, DiskCache(config.cache_dir, config.cache_bytes), host, config.share)


def _wanted(header: PackedHeader, share: Share | None, others: OtherShards | None) -> _Wanted:
    manifest = header.manifest
    held = share.cut(header).kept.manifest if share else manifest
    told = manifest if others else held  # the head of a group speaks for all of it
    return _Wanted(manifest, layer_bytes(held), told.layer_sites(), AdapterScales(told, held))


def layer_bytes(manifest: Manifest) -> tuple[int, ...]:
    """Bytes of each layer; lm_head is the last."""
    sizes = [0] * (manifest.num_layers + 1)
    for entry in manifest.sites:
        sizes[entry.layer] += entry.num_bytes
    return tuple(sizes)
