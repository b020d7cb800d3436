"""A mirror of the adapter registry, whole and in memory; the gateway resolves names from it alone.

It is read once at the start, and then follows the registry's journal: every change has a number, and what came after
the mirror's own is read, nothing else. Events only say that it is time to look; one that is lost costs a second. While
Redis is away the mirror stands still and keeps serving what it knows; of a Redis that has lost the registry it knows
more, and puts it back (restore.py).
"""

import asyncio
import logging
import time
from collections.abc import Collection
from uuid import uuid4

from infinilora.gateway.mirror import Entry, Mirror
from infinilora.gateway.restore import Life, is_lost, next_life, put_back
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import AdapterRecord, AliasRecord, RegistryLife
from infinilora.protocol.control import AdapterEvent
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Fingerprint
from infinilora.runtime.bus import Bus
from infinilora.runtime.store import READ_BATCH, Change, Store

logger = logging.getLogger(__name__)

POLL_S = 1.0
STALE_S = 3.0
"""Without a look at Redis for this long the mirror is called stale."""


class Registry:
    """Names as of `_revision`, the registry's when the mirror last agreed with it; None until it was first read."""

    def __init__(self, store: Store, bus: Bus) -> None:
        self._store = store
        self._bus = bus
        self._mirror = Mirror()
        self._life: Life = None
        self._revision: int | None = None
        self._seen_s = time.monotonic() - STALE_S
        self._reading = asyncio.Lock()

    @property
    def is_loaded(self) -> bool:
        return self._revision is not None

    @property
    def age_s(self) -> float:
        """Seconds since the mirror last agreed with Redis."""
        return time.monotonic() - self._seen_s

    @property
    def is_stale(self) -> bool:
        return self.age_s > STALE_S

    @property
    def is_same(self) -> Change:
        """The condition that the registry is still the one that was read."""
        return Change(keys.REGISTRY_LIFE, self._life.raw if self._life else None)

    def get(self, tenant: str, name: str) -> AdapterRecord | None:
        return self._mirror.get(tenant, name)

    def alias(self, tenant: str, name: str) -> AliasRecord | None:
        return self._mirror.alias(tenant, name)

    def page(self, tenant: str, after: str, limit: int, *, bases: Collection[Fingerprint] | None = None) -> list[Entry]:
        """As `Mirror.page`."""
        return self._mirror.page(tenant, after, limit, bases=bases)

    def __len__(self) -> int:
        return len(self._mirror)

    async def follow_events(self) -> None:
        """Look when somebody announces a change. Runs for ever."""
        async for event in self._bus.subscribe(subjects.ADAPTER_EVENTS, AdapterEvent):
            if self._revision is not None and event.revision > self._revision:
                await self.look()

    async def follow_revisions(self) -> None:
        """Look now and then. Runs for ever."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """`refresh`, or stand still until a later look."""
        try:
            await self.refresh()
        except Unavailable as error:
            logger.debug("registry not read", extra={"reason": error.message})
        except Internal as error:  # a record that is not one: a person must mend it
            logger.error("registry unreadable", extra={"reason": error.message})  # noqa: TRY400 - no traceback

    async def refresh(self) -> None:
        """Make the mirror agree with Redis, or Redis with the mirror if it has lost everything. Raises Unavailable."""
        async with self._reading:
            life = await self._living()
            if life != self._life or not await self._is_followed():
                await self._read_all(life)
            self._seen_s = time.monotonic()

    async def _living(self) -> Life:
        """The registry's life as it is in Redis; a new one where none is known, the next where ours was lost."""
        there = await self._store.get(keys.REGISTRY_LIFE, RegistryLife)
        mine, revision = self._life, self._revision
        if mine is not None and revision is not None:
            if not is_lost(mine.value, revision, there.value if there else None):
                return there
            await put_back(self._store, self._mirror.entries(), there)
            await next_life(self._store, mine.value, revision)
        elif there is None:
            await self._store.swap([Change(keys.REGISTRY_LIFE, None, RegistryLife(id=uuid4().hex))])
        return await self._store.get(keys.REGISTRY_LIFE, RegistryLife)

    async def _is_followed(self) -> bool:
        """Read what came after the mirror's number; False if that cannot be told from the journal."""
        revision = await self._store.counter(keys.REGISTRY_REVISION)
        if self._revision is None or revision < self._revision:  # younger than we: another store, or an older state
            return False
        if revision > self._revision:
            last = await self._read(self._mirror, self._revision)
            # After the journal: what was taken out of it while it was read shows.
            if await self._store.counter(keys.REGISTRY_FLOOR) > self._revision:
                return False
            self._revision = max(revision, last)
        return True

    async def _read_all(self, life: Life) -> None:
        while True:
            begun = await self._store.counter(keys.REGISTRY_REVISION)
            fresh = Mirror()
            last = await self._read(fresh, 0)
            if await self._store.counter(keys.REGISTRY_FLOOR) <= begun:
                break
        if await self._store.get(keys.REGISTRY_LIFE, RegistryLife) != life:  # lost while it was read
            raise Unavailable("the registry has changed hands", retry_after_s=1.0)
        self._revision, self._mirror, self._life = max(begun, last), fresh, life
        logger.info("registry read", extra={"revision": self._revision, "adapters": len(fresh)})

    async def _read(self, mirror: Mirror, after: int) -> int:
        """Bring a mirror up to date with what was changed after a number; the last number read."""
        while entries := await self._store.journal(keys.REGISTRY_JOURNAL, after, READ_BATCH):
            names = [entry for entry, _ in entries if not entry.startswith(keys.ALIAS)]
            aliases = [entry.removeprefix(keys.ALIAS) for entry, _ in entries if entry.startswith(keys.ALIAS)]
            await self._read_adapters(mirror, [_split(name) for name in names])
            await self._read_aliases(mirror, [_split(name) for name in aliases])
            after = entries[-1][1]
        return after

    async def _read_adapters(self, mirror: Mirror, names: list[tuple[str, str]]) -> None:
        found = await self._store.get_many([keys.adapter(*name) for name in names], AdapterRecord)
        for name, value in zip(names, found, strict=True):
            if value is None:
                mirror.drop(*name)
            else:
                mirror.put(value.value)

    async def _read_aliases(self, mirror: Mirror, names: list[tuple[str, str]]) -> None:
        found = await self._store.get_many([keys.alias(*name) for name in names], AliasRecord)
        for name, value in zip(names, found, strict=True):
            if value is None:
                mirror.drop_alias(*name)
            else:
                mirror.put_alias(value.value)


def _split(entry: str) -> tuple[str, str]:
    tenant, _, name = entry.partition("/")
    return tenant, name
