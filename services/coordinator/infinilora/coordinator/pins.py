"""Adapters that their owners want kept resident, told to the servers of the groups that are to hold them.

A server keeps what it was told by whoever led, so what it says that it keeps is where a leader begins.
"""

import asyncio
from collections.abc import Mapping, Set

from infinilora.coordinator.orders import TAKEN, Orders
from infinilora.coordinator.placement import Table
from infinilora.protocol.control import GroupLoad, Pin
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest
from infinilora.runtime.membership import Member


class Pins:
    """One leadership's. Remembers what each server's present life was told, by it and by those before."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._told: dict[str, tuple[str, frozenset[Digest]]] = {}

    async def round(
        self, servers: Mapping[str, Member], table: Table, pinned: Set[Digest], epoch: int
    ) -> frozenset[str]:
        """Have each group keep those of them that are planned there, and no longer what it was told to keep before.

        Returns the groups that did not answer: each order to one of those would be waited for, so it is given no more.
        """
        wanted = {group: frozenset(pinned & set(table.get(group, ()))) for group in servers}
        answers = await asyncio.gather(*(self._tell(g, server, wanted[g], epoch) for g, server in servers.items()))
        return frozenset(group for group, has_answered in zip(servers, answers, strict=True) if not has_answered)

    async def _tell(self, group: str, server: Member, wanted: frozenset[Digest], epoch: int) -> bool:
        """Whether it answers."""
        life, outcome = server.beat.incarnation, TAKEN
        told_life, told = self._told.get(group, ("", frozenset[Digest]()))
        told = told if told_life == life else _kept(server)
        for digest in sorted(wanted ^ told):
            body = Pin(digest=digest, pinned=digest in wanted)
            outcome = await self._orders.give(server, body, epoch)
            if outcome == Unavailable.code:
                break
            if outcome == TAKEN:
                told ^= {digest}
        self._told[group] = life, told
        return outcome != Unavailable.code


def _kept(server: Member) -> frozenset[Digest]:
    load = server.beat.load
    return frozenset(load.pinned) if isinstance(load, GroupLoad) else frozenset()
