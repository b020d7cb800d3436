"""Who has which slot of a pool, who waits, and what to do next. Pure: told the time, never asks for it.

    EMPTY --place--> STAGING --layers_ready(all)--> READY --drain--> DRAINING --emptied--> EMPTY
                        └────── drain (failed, or nobody wants it any more) ──┘

A tenancy of a slot raises its `slot_generation`. A *holder* (an engine's connection) leases a digest; only slots
that nobody leases are drained, and never pinned ones. Capacity is in bytes, at each adapter's true rank.

The queue: waiting digests in order of arrival. One that cannot be placed now (too big for what may be evicted, or of
a size not yet known) is passed by later ones. It *ages* when it has been passed `max_bypass` times or has waited
`age_after_s`: from then on no later one is placed before it, and what comes free is kept for it. One that has waited
`max_wait_s` is refused as overloaded. So nobody starves and nobody blocks for long: once its size is known, a lease is
passed at most `max_bypass` times, and granted or refused within `max_wait_s`. What pins alone leave no room for is
refused at once. Hints (digests that nobody leases, only asked to be staged) come after all leases, never age, and never
push out a leased, pinned or hinted adapter; a pinned one comes before the other hints and may push out what is hinted.

The caller asks `decide` for one decision at a time, acts, and reports with `place`, `no_room`, `emptied`, `refuse`.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import takewhile

from infinilora.pool.evict import Candidate, EvictionOrder, Heat, candidate, choose_victims
from infinilora.pool.tenancy import DEFAULT_RELOAD_S, Decision, Drain, Limits, Place, Refuse, Slot, SlotState, Waiting
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError, Overloaded, Unavailable
from infinilora.protocol.ids import Digest


class SlotTable:
    """The slots of one pool and the queue before them. Not thread-safe: the pool locks around it.

    Between calls: every digest is in at most one slot that is not draining, or in the queue, never in both;
    bytes of slots that are not EMPTY never exceed the capacity. What `decide` asks of all slots is kept as they change:
    a pool of a thousand slots is asked with every lease and release.
    """

    def __init__(
        self, *, num_slots: int, capacity_bytes: int, limits: Limits | None = None, first_generation: int = 0
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.limits = limits or Limits()
        self.slots = [Slot(index=i, slot_generation=first_generation) for i in range(num_slots)]
        self.waiting: dict[Digest, Waiting] = {}
        self.pins: set[Digest] = set()
        self.is_draining = False
        self._live: dict[Digest, Slot] = {}
        self._empty = list(range(num_slots))  # a heap: the lowest is placed in first
        self._evictable = EvictionOrder()
        self._leaving: set[Digest] = set()
        self._used_bytes = self._draining_bytes = self._num_draining = 0
        self._num_freed = 0
        self._heat = Heat()

    # What is asked for ---------------------------------------------------------------------------

    def lease(self, holder: str, digest: Digest, now: float) -> Slot | None:
        """Have `holder` hold `digest`: its slot if it has one (granted at once), None if it must wait. Idempotent."""
        slot = self._live.get(digest)
        if slot and holder in slot.holders:
            return slot
        if self.is_draining:
            raise _draining()
        self._heat.warm(digest, now)
        if slot is None:
            entry = self._wait_for(digest)
            if not entry.holders:
                entry.since, entry.bypassed = now, 0
            entry.holders.add(holder)
            return None
        slot.holders.add(holder)
        slot.evict_when_idle = False
        self._reconsider(slot)
        return slot

    def release(self, holder: str, digest: Digest, now: float) -> None:
        """End the holder's lease, or its wait. Nothing happens if there is none."""
        if entry := self.waiting.get(digest):
            entry.holders.discard(holder)
            if not entry.has_claim:
                del self.waiting[digest]
        if (slot := self._live.get(digest)) and holder in slot.holders:
            slot.holders.remove(holder)
            self._heat.warm(digest, now)
            self._reconsider(slot)

    def held_by(self, holder: str) -> tuple[Digest, ...]:
        """All digests that the holder leases or waits for."""
        leased = [d for d, s in self._live.items() if holder in s.holders]
        return (*leased, *(d for d, w in self.waiting.items() if holder in w.holders))

    def stage(self, digest: Digest) -> None:
        """A hint: have it resident, though nobody leases it."""
        if slot := self._live.get(digest):
            slot.is_wanted = True
            slot.evict_when_idle = False
            self._reconsider(slot)
        else:
            self._wait_for(digest).is_wanted = True

    def unhint(self, digest: Digest) -> None:
        """Take a hint back: what is ready stays, and goes as if it had been leased only. What still loads goes on."""
        slot = self._live.get(digest)
        if slot and slot.state is SlotState.READY and digest not in self.pins:
            slot.is_wanted = False

    def evict(self, digest: Digest) -> None:
        """A hint: give the slot up once nobody leases it. A new lease or a pin overrules it."""
        if (entry := self.waiting.get(digest)) and digest not in self.pins:
            entry.is_wanted = False
            if not entry.has_claim:
                del self.waiting[digest]
        if (slot := self._live.get(digest)) and digest not in self.pins:
            slot.is_wanted = False
            slot.evict_when_idle = True
            self._reconsider(slot)

    def pin(self, digest: Digest, *, pinned: bool) -> None:
        """Keep it resident, and stage it if it is not; or stop keeping it."""
        if pinned:
            self.pins.add(digest)
            self.stage(digest)
        else:
            self.pins.discard(digest)
            if slot := self._live.get(digest):
                self._reconsider(slot)

    # What the pool reports -----------------------------------------------------------------------

    def sized(self, digest: Digest, *, num_bytes: int, num_layers: int, now: float) -> None:
        """The manifest is read: this many bytes of the pool, this many layers (lm_head included)."""
        if (entry := self.waiting.get(digest)) and entry.num_bytes is None:
            entry.num_bytes, entry.num_layers, entry.since = num_bytes, num_layers, now

    def place(self, digest: Digest, now: float) -> Slot:
        """Give the digest an EMPTY slot. Its holders are granted their leases. After `decide` said Place."""
        entry = self.waiting[digest]
        assert entry.num_bytes is not None
        slot = self.slots[heappop(self._empty)]
        for earlier in takewhile(lambda w: w is not entry, self.waiting.values()):
            earlier.bypassed += earlier.num_bytes is not None
        del self.waiting[digest]
        slot.state = SlotState.STAGING
        slot.slot_generation += 1
        slot.digest, slot.num_bytes, slot.num_layers = digest, entry.num_bytes, entry.num_layers
        slot.layers_ready, slot.staged_at, slot.reload_s = 0, now, DEFAULT_RELOAD_S
        slot.holders, slot.is_wanted = entry.holders, entry.is_wanted
        slot.evict_when_idle = False
        self._used_bytes += slot.num_bytes
        self._live[digest] = slot
        self._reconsider(slot)
        return slot

    def no_room(self, digest: Digest) -> None:
        """There were bytes enough, but in too many pieces: it is asked again once another slot has been freed."""
        assert len(self._empty) < len(self.slots), "an empty pool has all its room in one piece"
        self.waiting[digest].split_at = self._num_freed

    def layers_ready(self, index: int, slot_generation: int, count: int, now: float) -> Slot | None:
        """Layers 0..count-1 are bound. None if that tenancy is over."""
        slot = self.slots[index]
        if slot.slot_generation != slot_generation or slot.state is not SlotState.STAGING:
            return None
        slot.layers_ready = max(slot.layers_ready, count)
        if slot.layers_ready >= slot.num_layers:
            slot.state = SlotState.READY
            slot.reload_s = max(1e-4, now - slot.staged_at)
            self._reconsider(slot)
        return slot

    def failed(self, digest: Digest) -> tuple[tuple[str, ...], Drain | None]:
        """The digest cannot be had: whoever leased it or waited loses it and is returned; its slot drains."""
        if entry := self.waiting.pop(digest, None):
            return tuple(sorted(entry.holders)), None
        slot = self._live.get(digest)
        if slot is None:
            return (), None
        holders, slot.holders = tuple(sorted(slot.holders)), set()
        return holders, self._drain(slot)

    def refuse(self, digest: Digest) -> tuple[str, ...]:
        """A waiting digest is given up; its holders, to be told."""
        return tuple(sorted(self.waiting.pop(digest).holders))

    def emptied(self, index: int, slot_generation: int) -> None:
        """The memory of a draining slot is free."""
        slot = self.slots[index]
        assert slot.state is SlotState.DRAINING
        assert slot.slot_generation == slot_generation
        self._used_bytes -= slot.num_bytes
        self._draining_bytes -= slot.num_bytes
        self._num_draining -= 1
        slot.state, slot.digest, slot.num_bytes, slot.layers_ready = SlotState.EMPTY, None, 0, 0
        heappush(self._empty, index)
        self._num_freed += 1

    # What to do next -----------------------------------------------------------------------------

    def decide(self, now: float) -> Decision | None:
        """The next thing to do, or None. A Drain has happened in the table already; report when it is done."""
        return self._drain_idle() or self._refuse_hopeless(now) or self._serve_queue(now)

    def next_deadline(self, now: float) -> float | None:
        """When `decide` may change its mind though nothing else happens: the next ageing or refusal after `now`."""
        sized = [w.since for w in self.waiting.values() if w.num_bytes is not None]
        times = [t + wait for t in sized for wait in (self.limits.age_after_s, self.limits.max_wait_s)]
        return min((t for t in times if t > now), default=None)

    def _drain_idle(self) -> Drain | None:
        if not self._leaving:
            return None
        return self._drain(next(slot for digest, slot in self._live.items() if digest in self._leaving))

    def _refuse_hopeless(self, now: float) -> Refuse | None:
        if not self.waiting:
            return None
        pinned = [self._live[digest].num_bytes for digest in self.pins if digest in self._live]
        for entry in self.waiting.values():
            if error := self._why_hopeless(entry, now, num_pinned=len(pinned), pinned_bytes=sum(pinned)):
                return Refuse(entry.digest, error)
        return None

    def _why_hopeless(
        self, entry: Waiting, now: float, *, num_pinned: int, pinned_bytes: int
    ) -> InfiniLoraError | None:
        if self.is_draining:
            return _draining()
        if num_pinned == len(self.slots):
            return Overloaded(
                f"adapter {entry.digest} needs a slot; all {len(self.slots)} of this pool hold pinned adapters: "
                "unpin one or raise num_slots"
            )
        if entry.num_bytes is None:
            return None
        wanted = f"adapter {entry.digest} needs {entry.num_bytes} bytes"
        if entry.num_bytes > self.capacity_bytes:
            return AdapterFailed(
                f"{wanted}; this pool has {self.capacity_bytes} in all: raise pool_bytes or use a larger group"
            )
        if entry.num_bytes > self.capacity_bytes - pinned_bytes:
            return Overloaded(f"{wanted}; of {self.capacity_bytes} in this pool {pinned_bytes} are pinned")
        if now - entry.since >= self.limits.max_wait_s:
            return Overloaded(
                f"{wanted}; none came free in {self.limits.max_wait_s:g} s, all are leased", retry_after_s=1.0
            )
        return None

    def _serve_queue(self, now: float) -> Drain | Place | None:
        hints: list[Waiting] = []
        for entry in self.waiting.values():
            if entry.num_bytes is None:
                continue
            if not entry.holders:
                hints.append(entry)
                continue
            is_aged = self._is_aged(entry, now)
            if decision := self._make_room(entry, entry.num_bytes, is_aged=is_aged):
                return decision
            if is_aged:
                return None
        hints.sort(key=lambda w: w.digest not in self.pins)
        decisions = (self._make_room(w, w.num_bytes or 0, is_aged=False) for w in hints)
        return next((d for d in decisions if d), None)

    def _make_room(self, entry: Waiting, num_bytes: int, *, is_aged: bool) -> Drain | Place | None:
        """Place if there is room; else drain the next victim, if that helps (an aged entry keeps what it frees)."""
        short_bytes = num_bytes - self.free_bytes
        short_slots = 0 if self._empty else 1
        is_split = entry.split_at == self._num_freed
        if short_bytes <= 0 and not short_slots and not is_split:
            return Place(entry.digest, num_bytes)
        short_bytes = max(short_bytes - self._draining_bytes, 0)
        short_slots = max(short_slots - self._num_draining, 0)
        if is_split and not self._num_draining:
            short_slots = 1
        if not (short_bytes or short_slots):
            return None
        by_worth: Iterable[Candidate] = self._evictable
        if not entry.holders and entry.digest not in self.pins:  # a hint pushes out nothing that is hinted
            by_worth = [c for c in by_worth if not self._live[c.digest].is_wanted]
        victims = choose_victims(by_worth, need_bytes=short_bytes, need_slots=short_slots)
        if victims is None and is_aged:
            victims = tuple(c.digest for c in by_worth)
        return self._drain(self._live[victims[0]]) if victims else None

    def _is_aged(self, entry: Waiting, now: float) -> bool:
        return now - entry.since >= self.limits.age_after_s or entry.bypassed >= self.limits.max_bypass

    def _drain(self, slot: Slot) -> Drain:
        assert not slot.holders
        assert slot.digest is not None
        slot.state = SlotState.DRAINING
        slot.is_wanted = slot.evict_when_idle = False
        self._draining_bytes += slot.num_bytes
        self._num_draining += 1
        self._evictable.discard(slot.digest)
        self._leaving.discard(slot.digest)
        del self._live[slot.digest]
        return Drain(slot.index, slot.slot_generation, slot.digest)

    def _reconsider(self, slot: Slot) -> None:
        """Its state, holders, hints or pin have changed: may it be evicted, and has it to go without being asked?"""
        digest = slot.digest
        assert digest is not None
        is_idle = not slot.holders and digest not in self.pins
        if is_idle and slot.state is SlotState.READY:
            level = self._heat.level(digest)
            self._evictable.add(candidate(digest, slot.num_bytes, level=level, reload_s=slot.reload_s))
        else:
            self._evictable.discard(digest)
        is_unwanted_load = slot.state is SlotState.STAGING and not slot.is_wanted
        if is_idle and (is_unwanted_load or slot.evict_when_idle):
            self._leaving.add(digest)
        else:
            self._leaving.discard(digest)

    def _wait_for(self, digest: Digest) -> Waiting:
        return self.waiting.setdefault(digest, Waiting(digest))

    # What is so ----------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self._used_bytes

    @property
    def num_leases(self) -> int:
        return sum(len(s.holders) for s in self._live.values())

    def slot_of(self, digest: Digest) -> Slot | None:
        """The slot that stages or holds the digest."""
        return self._live.get(digest)

    def digest_at(self, index: int, slot_generation: int) -> Digest | None:
        """What a slot stages or holds in this tenancy; None if that is over."""
        slot = self.slots[index]
        is_live = slot.slot_generation == slot_generation and slot.state in (SlotState.STAGING, SlotState.READY)
        return slot.digest if is_live else None

    def size_of(self, digest: Digest) -> int | None:
        """Bytes of a digest that has a slot, or waits and is sized."""
        slot, entry = self._live.get(digest), self.waiting.get(digest)
        return slot.num_bytes if slot else entry.num_bytes if entry else None

    def resident(self) -> tuple[Digest, ...]:
        return tuple(d for d, s in self._live.items() if s.state is SlotState.READY)

    def loading(self) -> tuple[Digest, ...]:
        """What is on its way in, or waits for room."""
        return (*(d for d, s in self._live.items() if s.state is SlotState.STAGING), *self.waiting)

    def check(self) -> None:
        """Raise AssertionError where the table contradicts itself."""
        assert self.used_bytes <= self.capacity_bytes, (self.used_bytes, self.capacity_bytes)
        live = {s.digest: s for s in self.slots if s.state in (SlotState.STAGING, SlotState.READY)}
        assert live == self._live
        assert self.used_bytes == sum(s.num_bytes for s in self.slots)
        draining = [s.num_bytes for s in self.slots if s.state is SlotState.DRAINING]
        assert (self._num_draining, self._draining_bytes) == (len(draining), sum(draining))
        assert sorted(self._empty) == [s.index for s in self.slots if s.state is SlotState.EMPTY]
        idle = [s for d, s in self._live.items() if not s.holders and d not in self.pins]
        assert {c.digest for c in self._evictable} == {s.digest for s in idle if s.state is SlotState.READY}
        assert not set(self._live) & set(self.waiting)
        assert all(w.has_claim for w in self.waiting.values())
        for slot in self.slots:
            assert (slot.state is SlotState.EMPTY) == (slot.digest is None)
            assert not slot.holders or slot.state in (SlotState.STAGING, SlotState.READY)
            assert (slot.state is SlotState.READY) <= (slot.layers_ready == slot.num_layers)


def _draining() -> Unavailable:
    return Unavailable("this LoRA server is draining and grants no new lease; ask another", retry_after_s=1.0)
