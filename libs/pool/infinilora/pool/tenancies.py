"""What becomes of each adapter of a pool: its slot, its memory, its load, and what its holders are told.

    sized -> waits -> placed -> layers ready, one by one -> all of them -> drained -> emptied
               └──────────────── lost: it cannot be had ──────────────────────┘

It decides nothing itself: `slots.SlotTable` does, and this carries the decisions out. It is told the time, takes no
lock, and waits for nothing but executions that run: `pool.AdapterPool` locks around it.
"""

import logging
import secrets
from collections.abc import Callable, Sequence

from infinilora.pool.backoff import Failures
from infinilora.pool.config import PoolConfig, PoolKernels
from infinilora.pool.holders import Holders
from infinilora.pool.loader import Loader, Target
from infinilora.pool.memory import SlotMemory
from infinilora.pool.scales import SiteScale
from infinilora.pool.slots import SlotTable
from infinilora.pool.telling import is_worth_telling
from infinilora.pool.tenancy import Drain, Place, Refuse, Slot, SlotState
from infinilora.pool.wanted import Wanted
from infinilora.pool.watch import PoolWatch
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError
from infinilora.protocol.ids import Digest
from infinilora.protocol.shards import HEAD
from infinilora.weights.packed import PackedHeader

logger = logging.getLogger(__name__)

Hold = Callable[[int, int], bool]
"""Of a slot and its slot_generation. False: nothing launched reads it any more; True: `clear` once that is so."""


class Tenancies:
    """`wanted`: every adapter that waits, its size known, or has a slot that is not draining.

    `leaving`: deleted, but still waiting or in a slot. `gone`: no longer; the tiers are to be emptied of them.
    """

    def __init__(
        self,
        config: PoolConfig,
        kernels: PoolKernels,
        memory: SlotMemory,
        loader: Loader,
        holders: Holders,
        *,
        hold: Hold,
        watch: PoolWatch,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._memory = memory
        self._loader = loader
        self._holders = holders
        self._hold = hold
        self._watch = watch
        self.table = SlotTable(
            num_slots=config.num_slots,
            capacity_bytes=memory.capacity_bytes,
            limits=config.limits,
            # A plan made for an earlier life of this process must not fit a tenancy of this one.
            first_generation=secrets.randbits(30),
        )
        self.failures = Failures(config.retry_s)
        self.wanted: dict[Digest, Wanted] = {}
        self.leaving: set[Digest] = set()
        self.gone: set[Digest] = set()

    # What is asked for ---------------------------------------------------------------------------

    def want_waiting(self, digest: Digest) -> None:
        """Have it brought, if it waits for its size."""
        if digest in self.table.waiting:
            self._loader.want(digest)

    def release(self, holder: str, digest: Digest, now: float) -> None:
        """A lease ends, or the wait for it. Waits for an execution of this holder that is running now."""
        slot = self.table.slot_of(digest)
        self.table.release(holder, digest, now)
        self._holders.forget(holder, digest, slot)
        if digest in self.leaving:
            self.table.evict(digest)
        if slot is None and digest not in self.table.waiting:
            self._loader.cancel(digest)
            self.wanted.pop(digest, None)

    def evict(self, digest: Digest) -> None:
        self.table.evict(digest)
        if digest not in self.table.waiting and self.table.slot_of(digest) is None:
            self._loader.cancel(digest)

    def tell(self, slot: Slot, *, only: str | None = None) -> None:
        """Tell its holders, or one of them, what the slot has."""
        assert slot.digest is not None
        wanted = self.wanted[slot.digest]
        self._holders.tell(slot, wanted.layer_sites, wanted.scales, only=only)

    # What loads and other shards report ------------------------------------------------------------

    def sized(self, digest: Digest, header: PackedHeader, now: float) -> None:
        """The manifest is read."""
        if digest not in self.table.waiting:
            # Staged: news of an earlier load, overtaken by a later one. Else nobody wants it any more.
            if self.table.slot_of(digest) is None:
                self._loader.cancel(digest)
        elif error := self._config.misfit(digest, header.manifest):
            self._loader.cancel(digest)
            self._lose(digest, error, now)
        else:
            wanted = Wanted.of(header, self._config.share, for_group=self._memory.is_of_group)
            self.wanted[digest] = wanted
            num_layers = self._config.num_layers + 1  # lm_head counts as a layer, the last
            self.table.sized(digest, num_bytes=self._memory.cost(wanted), num_layers=num_layers, now=now)

    def layer_ready(self, target: Target, count: int, tier: str, now: float) -> bool:
        """Layers 0..count-1 of a tenancy are there in this process. True: all there are, on every shard."""
        digest = self.table.digest_at(target.slot, target.slot_generation)
        if digest is None:
            return False
        self.wanted[digest].scales.read(count - 1, target.layers[count - 1])
        return self._advance(HEAD, target.slot, target.slot_generation, count, tier, now)

    def shard_ready(
        self,
        shard: int,
        slot: int,
        slot_generation: int,
        count: int,
        *,
        scales: Sequence[SiteScale],
        tier: str,
        now: float,
    ) -> bool:
        """As `layer_ready`, of another shard. `scales`: those that it has read since it last said so."""
        digest = self.table.digest_at(slot, slot_generation)
        if digest is None:
            return False
        for scale in scales:
            self.wanted[digest].scales.put(scale)
        return self._advance(shard, slot, slot_generation, count, tier, now)

    def failed(self, digest: Digest, error: InfiniLoraError, now: float) -> None:
        """It cannot be had, here or on another shard: nobody has it then."""
        self._watch.load_failed(error.code)
        self._lose(digest, error, now)

    def empty(self, slot: int, slot_generation: int) -> None:
        """No load writes there any more: clear it, now or once all that was launched with the tenancy has run."""
        if not self._hold(slot, slot_generation):
            self.clear(slot, slot_generation)

    def clear(self, slot: int, slot_generation: int) -> None:
        """This process computes with the tenancy no more."""
        self._kernels.clear(slot)
        self.emptied(HEAD, slot, slot_generation)

    def emptied(self, shard: int, slot: int, slot_generation: int) -> None:
        """That shard computes with the tenancy no more, and its memory is free."""
        if self._memory.emptied(shard, slot, slot_generation):
            self.table.emptied(slot, slot_generation)

    def _advance(self, shard: int, index: int, slot_generation: int, count: int, tier: str, now: float) -> bool:
        count = self._memory.layers_ready(shard, index, slot_generation, count)
        known = self.table.slots[index]
        if not is_worth_telling(known.layers_ready, count, known.num_layers):
            return False
        slot = self.table.layers_ready(index, slot_generation, count, now)
        if slot is None:
            return False
        self.tell(slot)
        if slot.state is not SlotState.READY:
            return False
        assert slot.digest is not None
        extra = {"adapter_id": slot.digest, "slot": slot.index, "staged_s": round(slot.reload_s, 4), "tier": tier}
        logger.info("adapter resident", extra=extra)
        self._watch.loaded(tier, slot.reload_s)
        self.failures.forgive(slot.digest)
        return True

    # What the table decides ----------------------------------------------------------------------

    def carry_out(self, now: float) -> None:
        """Do what the table decides until it has nothing more to say."""
        while decision := self.table.decide(now):
            match decision:
                case Drain():
                    self._drain(decision)
                case Place():
                    self._place(decision.digest, now)
                case Refuse():
                    self._refuse(decision, now)
        for digest in [d for d in self.leaving if not self._has(d)]:
            self.leaving.remove(digest)
            self.gone.add(digest)

    def _place(self, digest: Digest, now: float) -> None:
        runs = self._memory.allocate(digest, self.wanted[digest])
        if runs is None:
            self.table.no_room(digest)
            return
        slot = self.table.place(digest, now)
        target = self._memory.stage(digest, slot, runs)
        self.tell(slot)
        self._loader.stage(digest, target)

    def _drain(self, drain: Drain) -> None:
        self._watch.drained()
        self.wanted.pop(drain.digest, None)
        self._memory.empty(drain.slot, drain.slot_generation)
        if self._loader.cancel(drain.digest):
            self.empty(drain.slot, drain.slot_generation)

    def _refuse(self, refusal: Refuse, now: float) -> None:
        digest, error = refusal.digest, refusal.error
        self._loader.cancel(digest)
        self.wanted.pop(digest, None)
        if isinstance(error, AdapterFailed):  # not of this moment: it fits no better later
            self._note_failure(digest, error, now)
        self._holders.lose(self.table.refuse(digest), digest, error)

    def _lose(self, digest: Digest, error: InfiniLoraError, now: float) -> None:
        self._note_failure(digest, error, now)
        slot = self.table.slot_of(digest)
        holders, drain = self.table.failed(digest)
        self._holders.lose(holders, digest, error, slot)
        self.wanted.pop(digest, None)
        if drain:
            self._drain(drain)

    def _note_failure(self, digest: Digest, error: InfiniLoraError, now: float) -> None:
        self.failures.note(digest, error, now, secrets.randbelow(1000) / 1000)

    def _has(self, digest: Digest) -> bool:
        """Whether it waits, has a slot, or has one that is still being emptied."""
        return digest in self.table.waiting or any(slot.digest == digest for slot in self.table.slots)
