"""What a pool hears of the registry. A registration that it misses costs whoever asks some seconds, no more."""

from infinilora.pool.pool import AdapterPool
from infinilora.protocol import subjects
from infinilora.protocol.control import AdapterEvent
from infinilora.runtime.bus import Bus


async def follow_registrations(pool: AdapterPool, bus: Bus) -> None:
    """Tell the pool what was registered, maybe anew. Runs for ever."""
    async for event in bus.subscribe(subjects.ADAPTER_EVENTS, AdapterEvent):
        if event.action != "delete":
            pool.registered(event.digest)
