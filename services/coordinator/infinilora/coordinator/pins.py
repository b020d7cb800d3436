"""Adapters that their owners want kept resident, told to the servers of the groups that are to hold them."""

import asyncio
from collections.abc import Mapping, Set

from infinilora.coordinator.orders import TAKEN, Orders
from infinilora.coordinator.placement import Table
from infinilora.protocol.control import Pin
from infinilora.protocol.ids import Digest
from infinilora.runtime.membership import Member


class Pins:
    """Remembers what each server's present life was told by this leader; a new leader tells it again."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._told: dict[str, tuple[str, frozenset[Digest]]] = {}

    async def round(self, servers: Mapping[str, Member], table: Table, pinned: Set[Digest], epoch: int) -> None:
        """Have each group keep those of them that are planned there, and no longer what it was told to keep before."""
        async with asyncio.TaskGroup() as tasks:
            for group, server in servers.items():
                wanted = frozenset(pinned & set(table.get(group, ())))
                tasks.create_task(self._tell(group, server, wanted, epoch))

    async def _tell(self, group: str, server: Member, wanted: frozenset[Digest], epoch: int) -> None:
        life = server.beat.incarnation
        told_life, told = self._told.get(group, ("", frozenset[Digest]()))
        told = told if told_life == life else frozenset()
        for digest in sorted(wanted ^ told):
            body = Pin(digest=digest, pinned=digest in wanted)
            if await self._orders.give(server, body, epoch) == TAKEN:
                told ^= {digest}
        self._told[group] = life, told
