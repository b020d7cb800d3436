"""What the head of a group keeps of its other shards: their memory, and how far each is with every tenancy.

    head                               another shard
      StageSlot(digest, slot, starts) ->    loads its share to those pages
                                      <-    ready (slot, layers), or failed
      EmptySlot(slot)                 ->    stops, computes with it no more, gives nothing back by itself
                                      <-    emptied (slot)

The others decide nothing: even the place of each layer in their memory is chosen here, in an arena that mirrors theirs,
so that what fits here fits there. Not thread-safe: the pool locks around it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from infinilora.pool.pages import PageArena, Run
from infinilora.pool.share import Share
from infinilora.protocol.adapter import Manifest
from infinilora.protocol.ids import Digest
from infinilora.protocol.shards import HEAD, Sharding


@dataclass(frozen=True, slots=True)
class StageSlot:
    """Load a share to a slot: layer l to the pages from `starts[l]` on. The slot is empty."""

    digest: Digest
    slot: int
    slot_generation: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmptySlot:
    """Compute with this tenancy no more and forget it; then say so."""

    slot: int
    slot_generation: int


@dataclass(frozen=True, slots=True)
class ForgetDigest:
    """It is deleted: remove its copies from every tier of that shard's host."""

    digest: Digest


Order = StageSlot | EmptySlot | ForgetDigest

Send = Callable[[int, Order], None]
"""Called with a shard's number, under the pool's lock: be quick. Orders to one shard stay in order."""


@dataclass(slots=True)
class _Tenancy:
    """`runs`: of each other shard. `counts`: leading layers that each shard has. `left`: who still has it."""

    slot_generation: int
    runs: dict[int, tuple[Run, ...]]
    counts: list[int]
    left: set[int] = field(default_factory=set)


class OtherShards:
    """Every page of a mirrored arena is free, or of one tenancy until its shard has said that it is emptied."""

    def __init__(self, sharding: Sharding, capacity_bytes: int, send: Send) -> None:
        """`capacity_bytes`: of each shard, this one's too."""
        self._send = send
        self._num_shards = sharding.shape.num_shards
        shards = range(HEAD + 1, self._num_shards)
        self._shares = {shard: Share.of_group(sharding, shard) for shard in shards}
        nothing = torch.empty(0, dtype=torch.uint8)
        self._arenas = {shard: PageArena(capacity_bytes, memory=nothing) for shard in shards}
        self._allocated: dict[Digest, dict[int, tuple[Run, ...]]] = {}
        self._tenancies: dict[int, _Tenancy] = {}

    def cost(self, manifest: Manifest) -> int:
        """What an adapter takes of the capacity of the fullest of these shards."""
        arenas = self._arenas.items()
        return max((arena.cost(self._shares[shard].layer_bytes(manifest)) for shard, arena in arenas), default=0)

    def allocate(self, digest: Digest, manifest: Manifest) -> bool:
        """Take its pages on each of these shards, for the `stage` that follows; False: no room, nothing was taken."""
        taken: dict[int, tuple[Run, ...]] = {}
        for shard, arena in self._arenas.items():
            runs = arena.allocate(self._shares[shard].layer_bytes(manifest))
            if runs is None:
                self._free(taken)
                return False
            taken[shard] = runs
        self._allocated[digest] = taken
        return True

    def stage(self, digest: Digest, slot: int, slot_generation: int) -> None:
        """Have every shard load its share to where `allocate` found room."""
        runs = self._allocated.pop(digest)
        self._tenancies[slot] = _Tenancy(slot_generation, runs, [0] * self._num_shards, set(range(self._num_shards)))
        for shard, own in runs.items():
            self._send(shard, StageSlot(digest, slot, slot_generation, tuple(run.start for run in own)))

    def layers_ready(self, shard: int, slot: int, slot_generation: int, count: int) -> int:
        """A shard has layers 0..count-1 of a tenancy; how many leading layers every shard has now."""
        tenancy = self._of(slot, slot_generation)
        if tenancy is None:
            return 0
        tenancy.counts[shard] = max(tenancy.counts[shard], count)
        return min(tenancy.counts)

    def empty(self, slot: int, slot_generation: int) -> None:
        """Nobody leases it any more: have every shard give it up."""
        for shard in self._arenas:
            self._send(shard, EmptySlot(slot, slot_generation))

    def emptied(self, shard: int, slot: int, slot_generation: int) -> bool:
        """A shard has given it up; True when that was the last one, and the slot may be used again."""
        tenancy = self._of(slot, slot_generation)
        if tenancy is None or shard not in tenancy.left:
            return False
        tenancy.left.remove(shard)
        if shard != HEAD:
            self._arenas[shard].free(tenancy.runs.pop(shard))
        if tenancy.left:
            return False
        del self._tenancies[slot]
        return True

    def forget(self, digest: Digest) -> None:
        for shard in self._arenas:
            self._send(shard, ForgetDigest(digest))

    def check(self) -> None:
        """Raise AssertionError where a mirrored arena and the tenancies disagree."""
        assert not self._allocated, list(self._allocated)
        for shard, arena in self._arenas.items():
            live: list[Sequence[Run]] = [t.runs[shard] for t in self._tenancies.values() if shard in t.runs]
            arena.check(run for runs in live for run in runs)

    def _of(self, slot: int, slot_generation: int) -> _Tenancy | None:
        tenancy = self._tenancies.get(slot)
        return tenancy if tenancy and tenancy.slot_generation == slot_generation else None

    def _free(self, taken: dict[int, tuple[Run, ...]]) -> None:
        for shard, runs in taken.items():
            self._arenas[shard].free(runs)
