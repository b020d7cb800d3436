"""The pool of a shard that is not the head of its group: memory and kernels that do as they are told. Thread-safe.

It knows no lease and chooses nothing. Whoever has a link here may compute with the tenancies that are here, by slot and
slot_generation: the head grants, and empties a slot only when nobody leases it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from infinilora.pool.config import PoolConfig, PoolKernels, PoolLoad
from infinilora.pool.execute import Grants
from infinilora.pool.group import EmptySlot, ForgetDigest, Order, StageSlot
from infinilora.pool.loader import Lanes, Loader, Target
from infinilora.pool.pace import Pace
from infinilora.pool.pages import PAGE_BYTES
from infinilora.pool.retire import RetireQueue
from infinilora.pool.scales import AdapterScales, SiteScale
from infinilora.pool.share import Share
from infinilora.pool.telling import is_worth_telling
from infinilora.protocol.adapter import Manifest
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError, Internal
from infinilora.protocol.ids import Digest
from infinilora.runtime.blob_store import BlobStore
from infinilora.weights.packed import PackedHeader


class FollowerListener(Protocol):
    """Who tells the head. Called from any thread, under the pool's lock: be quick, do not call back."""

    def ready(self, slot: int, slot_generation: int, count: int, *, scales: Sequence[SiteScale], tier: str) -> None: ...
    def failed(self, slot: int, slot_generation: int, error: InfiniLoraError) -> None: ...
    def emptied(self, slot: int, slot_generation: int) -> None: ...


@dataclass(slots=True)
class _Tenancy:
    digest: Digest
    slot_generation: int
    starts: tuple[int, ...]
    target: Target | None = None
    scales: AdapterScales | None = None
    num_bytes: int = 0
    layers_ready: int = 0
    is_leaving: bool = False


class FollowerPool:
    """`_tenancies`, by slot: what it was told to have. Every holder is granted all of it that is here."""

    def __init__(
        self,
        config: PoolConfig,
        share: Share,
        blobs: BlobStore,
        kernels: PoolKernels,
        listener: FollowerListener,
        *,
        on_death: Callable[[BaseException], None],
    ) -> None:
        """`config.share` is this one."""
        self.kernels = kernels
        self.device = config.device
        self._share = share
        self._config = config
        self._listener = listener
        self._lock = threading.Lock()
        self._memory = config.device.allocate(config.capacity_bytes)
        self._retiring = RetireQueue(on_death)
        self._tenancies: dict[int, _Tenancy] = {}
        self._slots: dict[Digest, int] = {}
        self._grants: dict[str, Grants] = {}
        self._tiers = config.tiers(blobs)
        lanes = Lanes(near=config.loader_threads, far=config.fetch_threads)
        self._pace = Pace(config.load_share)
        self._loader = Loader(
            self._tiers, kernels, self, lanes=lanes, on_death=on_death, pace=self._pace, device=config.device
        )

    # For links -----------------------------------------------------------------------------------

    def grants(self, holder: str) -> Grants:
        """What this link may compute with: everything that is here, as it comes and goes."""
        with self._lock:
            grants = self._grants.setdefault(holder, Grants(self._note_step, self._config.device))
            for slot, tenancy in self._tenancies.items():
                if tenancy.layers_ready and not tenancy.is_leaving:
                    grants.grant(slot, tenancy.slot_generation, tenancy.layers_ready)
            return grants

    def drop(self, holder: str) -> None:
        with self._lock:
            if grants := self._grants.pop(holder, None):
                for slot, events in grants.revoke_all().items():
                    self._retiring.note(slot, events)

    # For the head --------------------------------------------------------------------------------

    def obey(self, order: Order) -> None:
        """Begin to do as the head says; the listener is told what comes of it."""
        with self._lock:
            match order:
                case StageSlot():
                    self._stage(order)
                case EmptySlot():
                    self._leave(order)
                case ForgetDigest():
                    pass
        if isinstance(order, ForgetDigest):
            self._tiers.forget(order.digest)

    # What is so ----------------------------------------------------------------------------------

    def load(self) -> PoolLoad:
        with self._lock:
            used = sum(tenancy.num_bytes for tenancy in self._tenancies.values())
            total = self._config.capacity_bytes
            here = tuple(tenancy.digest for tenancy in self._tenancies.values() if self._is_here(tenancy))
            return PoolLoad(bytes_total=total, bytes_free=total - used, leases=0, waiting=0, resident=here)

    def sweep(self) -> int:
        """As `Tiers.sweep`: blocking, and for as long as the store takes."""
        return self._tiers.sweep()

    def tier_bytes(self) -> dict[str, int]:
        """As `AdapterPool.tier_bytes`."""
        return self._tiers.used_bytes()

    def check_idle(self) -> None:
        """Raise AssertionError if a load or a tenancy is left."""
        with self._lock:
            assert not self._tenancies, self._tenancies
            assert not self._slots, self._slots
        assert self._loader.num_loads == 0

    def close(self) -> None:
        """Stop all threads."""
        self._loader.close()
        self._retiring.close()
        self._tiers.close()

    # From the step threads of links ----------------------------------------------------------------

    def _note_step(self, slots: Iterable[int]) -> None:
        """As `AdapterPool._note_step`, of what is whole on this shard: loads go slowly while it is served."""
        found = (self._tenancies.get(slot) for slot in slots)
        if any(tenancy is not None and self._is_here(tenancy) for tenancy in found):
            self._pace.stepped(time.monotonic())

    # From the loader's threads -------------------------------------------------------------------

    def sized(self, digest: Digest, header: PackedHeader) -> None:
        with self._lock:
            slot = self._slots.get(digest)
            tenancy = None if slot is None else self._tenancies[slot]
            if slot is None or tenancy is None:
                self._loader.cancel(digest)
                return
            if tenancy.target is not None:  # news of an earlier load, overtaken by a later one
                return
            held = self._share.cut(header).kept.manifest
            try:
                layers = self._places(tenancy, held)
            except AdapterFailed as error:
                self._loader.cancel(digest)
                self._listener.failed(slot, tenancy.slot_generation, error)
                return
            tenancy.scales = AdapterScales(header.manifest, held)
            tenancy.target = Target(slot, tenancy.slot_generation, layers)
            tenancy.num_bytes = sum(layer.numel() for layer in layers)
            self._loader.stage(digest, tenancy.target)

    def layer_ready(self, target: Target, count: int, tier: str) -> None:
        with self._lock:
            tenancy = self._live(target.slot, target.slot_generation)
            if tenancy is None or tenancy.scales is None:
                return
            tenancy.scales.read(count - 1, target.layers[count - 1])
            told = tenancy.layers_ready
            if not is_worth_telling(told, count, self._config.num_layers + 1):
                return
            tenancy.layers_ready = count
            for grants in self._grants.values():
                grants.grant(target.slot, target.slot_generation, count)
            scales = [scale for layer in range(told, count) for scale in tenancy.scales.of(layer)]
            self._listener.ready(target.slot, target.slot_generation, count, scales=scales, tier=tier)

    def failed(self, digest: Digest, error: InfiniLoraError) -> None:
        with self._lock:
            slot = self._slots.get(digest)
            if slot is not None:
                self._listener.failed(slot, self._tenancies[slot].slot_generation, error)

    def stopped(self, target: Target) -> None:
        with self._lock:
            self._empty(target.slot)

    def _is_here(self, tenancy: _Tenancy) -> bool:
        """Whether all that this shard has of it has been loaded; lm_head counts as a layer."""
        return tenancy.layers_ready > self._config.num_layers

    # Under the lock ------------------------------------------------------------------------------

    def _stage(self, order: StageSlot) -> None:
        if order.slot in self._tenancies or order.digest in self._slots or not 0 <= order.slot < self._config.num_slots:
            raise Internal(f"the head stages {order.digest} to slot {order.slot}, which is in use here or is none")
        self._tenancies[order.slot] = _Tenancy(order.digest, order.slot_generation, order.starts)
        self._slots[order.digest] = order.slot
        self._loader.want(order.digest)

    def _leave(self, order: EmptySlot) -> None:
        tenancy = self._live(order.slot, order.slot_generation)
        if tenancy is None:
            raise Internal(f"the head empties slot {order.slot} of slot_generation {order.slot_generation}: not here")
        tenancy.is_leaving = True
        del self._slots[tenancy.digest]
        for grants in self._grants.values():
            self._retiring.note(order.slot, grants.revoke(order.slot))
        if self._loader.cancel(tenancy.digest):
            self._empty(order.slot)

    def _empty(self, slot: int) -> None:
        """Now, or once all that was launched with the tenancy has run."""
        if not self._retiring.hold(slot, partial(self._retired, slot)):
            self._clear(slot)

    def _retired(self, slot: int) -> None:
        with self._lock:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        tenancy = self._tenancies.pop(slot)
        self.kernels.clear(slot)
        self._listener.emptied(slot, tenancy.slot_generation)

    def _live(self, slot: int, slot_generation: int) -> _Tenancy | None:
        tenancy = self._tenancies.get(slot)
        is_it = tenancy is not None and tenancy.slot_generation == slot_generation and not tenancy.is_leaving
        return tenancy if is_it else None

    def _places(self, tenancy: _Tenancy, held: Manifest) -> list[torch.Tensor]:
        """The memory of each layer, where the head put it. Raises AdapterFailed for an adapter of another base."""
        if error := self._config.misfit(tenancy.digest, held):
            raise error
        sizes = held.layer_bytes()
        ends = [start * PAGE_BYTES + size for start, size in zip(tenancy.starts, sizes, strict=True)]
        if max(ends) > len(self._memory):
            raise Internal(f"the head places {tenancy.digest} up to byte {max(ends)} of {len(self._memory)}")
        return [self._memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
