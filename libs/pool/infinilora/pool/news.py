"""What a pool hears of the registry, and how it finds out what it did not hear.

A registration that it misses costs whoever asks some seconds, no more; a deletion, room on its disk until it looks.
"""

import asyncio
import logging

from infinilora.pool.follower import FollowerPool
from infinilora.pool.pool import AdapterPool
from infinilora.protocol import subjects
from infinilora.protocol.control import AdapterEvent
from infinilora.protocol.errors import StoreRefused, Unavailable
from infinilora.runtime.bus import Bus

logger = logging.getLogger(__name__)

SWEEP_S, SWEEP_AGAIN_S = 3600.0, 30.0
"""Between two looks at the disk; and after one that the store did not answer."""


async def follow_registrations(pool: AdapterPool, bus: Bus) -> None:
    """Tell the pool what was registered, maybe anew. Runs for ever."""
    async for event in bus.subscribe(subjects.ADAPTER_EVENTS, AdapterEvent):
        if event.action != "delete":
            pool.registered(event.digest)


async def sweep_deleted(pool: AdapterPool | FollowerPool) -> None:
    """Have the disk hold nothing that was deleted while this process was away. Runs for ever."""
    while True:
        pause_s = SWEEP_S
        try:
            await asyncio.to_thread(pool.sweep)
        except StoreRefused as error:  # it does not say what it has not: not to us, and not later
            logger.info("cached files are not compared with the store", extra={"reason": error.message})
        except Unavailable:
            pause_s = SWEEP_AGAIN_S
        await asyncio.sleep(pause_s)
