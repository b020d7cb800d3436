"""The bases that have no engine because nobody used them: known here, and woken by the first request for them.

Engines say nothing of them, so a gateway that was started since knows them from the coordinator's word alone.
"""

import asyncio
import logging
from collections.abc import Mapping

from infinilora.protocol import keys
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Fingerprint
from infinilora.runtime.store import Store

logger = logging.getLogger(__name__)

POLL_S = 1.0


class Asleep:
    """`models`: their served names, as last read. While the store is away, or once it has lost them, they stay."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.models: Mapping[Fingerprint, str] = {}

    async def follow(self) -> None:
        """Look now and then. Runs for ever."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        try:
            found = await self._store.get(keys.ASLEEP, dict[Fingerprint, str])
        except (Unavailable, Internal) as error:
            logger.debug("bases that sleep not read", extra={"reason": error.message})
            return
        if found is not None:  # gone is lost: the coordinator writes an empty one where nobody sleeps
            self.models = found.value
