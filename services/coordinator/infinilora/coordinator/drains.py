"""Groups that are to go: planned empty while they serve, then told to take no new work, then free to be ended.

An operator says so, or the scaler, as fewer are wanted; neither takes back what the other has said. Engines hold
nothing that is planned: they are told at once.

ready --(nothing of it is in the table)--> told to drain --(no lease is left)--> drained
"""

from collections.abc import Iterable, Mapping

from infinilora.coordinator.orders import TAKEN, Orders
from infinilora.coordinator.placement import Table
from infinilora.protocol import keys
from infinilora.protocol.control import Drain, GroupLoad
from infinilora.protocol.ids import Fingerprint
from infinilora.protocol.scale import Desired
from infinilora.runtime.membership import Member
from infinilora.runtime.store import Change, Store


class Drains:
    """As last read from the store. What a server's present life was told is remembered, and not told again."""

    def __init__(self, store: Store, orders: Orders) -> None:
        self._store = store
        self._orders = orders
        self._told: dict[str, tuple[str, bool]] = {}
        self.by_hand: frozenset[str] = frozenset()
        self.by_scale: frozenset[str] = frozenset()

    @property
    def wanted(self) -> frozenset[str]:
        """All that are to go."""
        return self.by_hand | self.by_scale

    async def refresh(self, bases: Iterable[Fingerprint]) -> None:
        found = await self._store.get(keys.DRAINS, list[str])
        counts = await self._store.get_many([keys.desired(base) for base in sorted(bases)], Desired)
        self.by_hand = frozenset(found.value) if found else frozenset()
        self.by_scale = frozenset(name for count in counts if count for name in count.value.draining)

    def told_nobody(self) -> None:
        """Others have led since this process told anybody anything."""
        self._told.clear()

    async def change(self, name: str, *, draining: bool) -> Change:
        """What notes that an operator wants a group, or an engine, emptied, or does not; for a leader to write."""
        found = await self._store.get(keys.DRAINS, list[str])
        before = set(found.value) if found else set()
        after = sorted(before | {name} if draining else before - {name})
        return Change(keys.DRAINS, found.raw if found else None, after)

    async def round(self, servers: Mapping[str, Member], table: Table, epoch: int) -> None:
        """Tell those that have nothing left to take no new work; and those that are to stay, to take it again.

        `servers`: of each group that is not dead, the process that takes its commands; and engines by their ids.
        """
        for group, server in sorted(servers.items()):
            is_wanted = group in self.wanted
            is_draining = server.beat.state == "draining"
            if is_wanted == is_draining or table.get(group) or server.beat.state == "starting":
                continue
            news = server.beat.incarnation, is_wanted
            if self._told.get(group) == news:
                continue
            if await self._orders.give(server, Drain(draining=is_wanted), epoch) == TAKEN:
                self._told[group] = news


def is_drained(server: Member) -> bool:
    """Whether whoever scales may end it: it takes no new work, and nobody holds anything of it."""
    load = server.beat.load
    return server.beat.state == "draining" and isinstance(load, GroupLoad) and not load.leases
