"""Who leads: a lease in the store with an epoch as fencing token. Standbys take over when it runs out.

A leader whose lease may have run out knows so by its own clock, and stops deciding before a standby can begin;
should a command of it still be on its way, receivers refuse its epoch.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from infinilora.protocol import keys
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.runtime.store import Store

logger = logging.getLogger(__name__)


class Leadership:
    """One candidate's view. `owner` names one life of one process."""

    def __init__(
        self, store: Store, owner: str, *, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._owner = owner
        self._lease_s = lease_s
        self._clock = clock
        self._valid_until = 0.0
        self._holding: int | None = None
        self._shown = False
        self.epoch = 0
        """The newest epoch known here, whoever leads."""
        self.leader: str | None = None
        """The owner of the lease as last read; None while nobody holds it or we cannot know."""

    @property
    def holding(self) -> int | None:
        """The epoch under which this process leads now; None while it does not. Never that of another leader."""
        return self._holding if self._clock() < self._valid_until else None

    @property
    def is_leading(self) -> bool:
        return self.holding is not None

    async def run(self) -> None:
        """Renew, or wait for the chance; for ever. Gives the lease up when cancelled."""
        try:
            while True:
                await self.step()
                await asyncio.sleep(self._lease_s / 4)
        finally:
            await self.resign()

    async def step(self) -> None:
        """Renew the lease or try to take it. The store being away changes nothing but what the clock does."""
        asked_at = self._clock()
        try:
            if self._holding is not None and not await self._renew(self._holding, asked_at):
                self._holding = None
            if self._holding is None:
                await self._acquire(asked_at)
        except Unavailable as error:
            logger.debug("lease not renewed", extra={"error": error.message})
            self._doubt()
        except Internal as error:  # what lies there is no lease: nobody leads until a person has mended it
            logger.error("lease unreadable", extra={"error": error.message})  # noqa: TRY400 - no traceback
            self._doubt()
        self._show()

    def _doubt(self) -> None:
        if not self.is_leading:
            self.leader = None

    async def deposed(self) -> None:
        """A process has seen a younger leader. Where the store knows of none, its counter was lost: begin far above."""
        holding = self._holding
        try:
            if holding is not None and await self._store.counter(keys.EPOCH) == holding:
                self.epoch = 2 * holding
        except (Unavailable, Internal) as error:
            logger.debug("epoch not read", extra={"error": error.message})
        await self.resign()

    async def resign(self) -> None:
        """Give the lease up at once, if it is ours."""
        holding, self._holding = self._holding, None
        self._show()
        if holding is not None:
            try:
                await self._store.release_lease(keys.LEADER, self._owner, holding)
            except (Unavailable, Internal):
                return  # it runs out by itself

    async def _renew(self, epoch: int, asked_at: float) -> bool:
        renewed = await self._store.renew_lease(keys.LEADER, self._owner, epoch, self._lease_s)
        if renewed:
            self._valid_until = asked_at + self._lease_s
        return renewed

    async def _acquire(self, asked_at: float) -> None:
        epoch = await self._store.acquire_lease(keys.LEADER, self._owner, self._lease_s, above=self.epoch)
        if epoch is not None:
            self._holding, self.epoch, self.leader = epoch, epoch, self._owner
            self._valid_until = asked_at + self._lease_s
            return
        held = await self._store.lease(keys.LEADER)
        self.leader = held.owner if held else None
        if held:
            self.epoch = max(self.epoch, held.epoch)

    def _show(self) -> None:
        if self._shown != self.is_leading:
            self._shown = self.is_leading
            logger.info("leading" if self._shown else "not leading any more", extra={"epoch": self.epoch})
