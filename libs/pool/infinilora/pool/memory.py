"""Where the adapter of each slot lies: in this process, and on the other shards of the group that it is the head of.

To the pool it is one memory: an adapter has room on every shard or on none, so many layers are ready as every shard
has, and a slot is free again once the last shard has emptied it. Not thread-safe: the pool locks around it.
"""

from infinilora.pool.config import PoolConfig
from infinilora.pool.group import OtherShards
from infinilora.pool.loader import Target
from infinilora.pool.pages import PageArena, Run
from infinilora.pool.tenancy import Slot
from infinilora.pool.wanted import Wanted
from infinilora.protocol.ids import Digest


class SlotMemory:
    """`_runs`, by slot: this process's pages of every tenancy that some shard has not emptied yet."""

    def __init__(self, config: PoolConfig, others: OtherShards | None) -> None:
        """`others`: of the group that this process is the head of."""
        self._arena = PageArena(config.capacity_bytes, memory=config.device.allocate(config.capacity_bytes))
        self._others = others
        self._runs: dict[int, tuple[Run, ...]] = {}

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes

    @property
    def is_of_group(self) -> bool:
        """Whether other shards hold parts of what lies here."""
        return self._others is not None

    def cost(self, wanted: Wanted) -> int:
        """What an adapter takes of the capacity: on the fullest shard."""
        own = self._arena.cost(wanted.layer_bytes)
        return max(own, self._others.cost(wanted.manifest)) if self._others else own

    def allocate(self, digest: Digest, wanted: Wanted) -> tuple[Run, ...] | None:
        """Take an adapter's pages on every shard, for the `stage` that follows; None: no room, nothing was taken."""
        runs = self._arena.allocate(wanted.layer_bytes)
        if runs is not None and self._others and not self._others.allocate(digest, wanted.manifest):
            self._arena.free(runs)
            return None
        return runs

    def stage(self, digest: Digest, slot: Slot, runs: tuple[Run, ...]) -> Target:
        """These pages are the slot's. Has the other shards load; returns where this process is to."""
        if self._others:
            self._others.stage(digest, slot.index, slot.slot_generation)
        self._runs[slot.index] = runs
        return Target(slot.index, slot.slot_generation, tuple(run.data for run in runs))

    def layers_ready(self, shard: int, slot: int, slot_generation: int, count: int) -> int:
        """A shard has layers 0..count-1 of a tenancy; how many leading layers every shard has now."""
        return self._others.layers_ready(shard, slot, slot_generation, count) if self._others else count

    def empty(self, slot: int, slot_generation: int) -> None:
        """Nobody leases the tenancy any more: have the other shards give it up."""
        if self._others:
            self._others.empty(slot, slot_generation)

    def emptied(self, shard: int, slot: int, slot_generation: int) -> bool:
        """A shard computes with the tenancy no more. True: it was the last one, and the memory is free."""
        if self._others and not self._others.emptied(shard, slot, slot_generation):
            return False
        self._arena.free(self._runs.pop(slot))
        return True

    def forget(self, digest: Digest) -> None:
        """It is deleted: have the other shards remove it from their hosts' tiers. Needs no lock."""
        if self._others:
            self._others.forget(digest)

    def check(self, in_use: set[int]) -> None:
        """Raise AssertionError where the pages and these slots, those that are not empty, disagree."""
        self._arena.check(run for runs in self._runs.values() for run in runs)
        assert set(self._runs) == in_use, (set(self._runs), in_use)
