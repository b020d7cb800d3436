"""A mirror of the adapter registry, whole and in memory; the gateway resolves names from it alone.

It is read once at the start, follows adapter events, and compares revisions now and then: an event may be
lost, a revision cannot. While Redis is away the mirror stands still and keeps serving what it knows.
"""

import asyncio
import logging
import time
from collections.abc import Iterator

from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.control import AdapterEvent
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.runtime.bus import Bus
from infinilora.runtime.store import Store

logger = logging.getLogger(__name__)

POLL_S = 1.0
STALE_S = 3.0
"""Without a look at Redis for this long the mirror is called stale."""
READ_BATCH = 500


class Registry:
    """Records by (tenant, name). `revision` is that of the registry when the mirror last agreed with it."""

    def __init__(self, store: Store, bus: Bus) -> None:
        self._store = store
        self._bus = bus
        self._records: dict[tuple[str, str], AdapterRecord] = {}
        self._revision: int | None = None
        self._seen_s = time.monotonic() - STALE_S
        self._changing = asyncio.Lock()  # a whole reading must not undo a change made while it ran

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

    def get(self, tenant: str, name: str) -> AdapterRecord | None:
        return self._records.get((tenant, name))

    def of_tenant(self, tenant: str) -> list[AdapterRecord]:
        found = (record for (owner, _), record in self._records.items() if owner == tenant)
        return sorted(found, key=lambda record: record.name)

    def __len__(self) -> int:
        return len(self._records)

    async def put(self, record: AdapterRecord, revision: int) -> None:
        """Note a change that this process has made itself."""
        async with self._changing:
            self._records[record.tenant, record.name] = record
            self._advance(revision)

    async def drop(self, tenant: str, name: str, revision: int) -> None:
        """Note a deletion that this process has made itself."""
        async with self._changing:
            self._records.pop((tenant, name), None)
            self._advance(revision)

    async def follow_events(self) -> None:
        """Apply the changes that others announce. Runs for ever."""
        async for event in self._bus.subscribe(subjects.ADAPTER_EVENTS, AdapterEvent):
            if self._revision is None or event.revision <= self._revision:
                continue
            try:
                await self._apply(event)
            except Unavailable:
                logger.info("registry event waits for the store", extra={"adapter_id": event.digest})
            except Internal as error:
                _cannot_read(error)

    async def follow_revisions(self) -> None:
        """Read the registry whenever its revision is not the mirror's. Runs for ever."""
        while True:
            try:
                await self.refresh()
            except Unavailable as error:
                logger.debug("registry not read", extra={"reason": error.message})
            except Internal as error:
                _cannot_read(error)
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Make the mirror agree with Redis. Raises Unavailable."""
        async with self._changing:
            revision = await self._store.counter(keys.REGISTRY_REVISION)
            if revision != self._revision:
                await self._load(revision)
            self._seen_s = time.monotonic()

    async def _load(self, revision: int) -> None:
        """Read everything. A change made meanwhile raises the revision and is seen by the next look."""
        records: dict[tuple[str, str], AdapterRecord] = {}
        for batch in _batches(sorted(await self._store.members(keys.REGISTRY_INDEX))):
            wanted = [keys.adapter(*member.split("/", 1)) for member in batch]
            for value in await self._store.get_many(wanted, AdapterRecord):
                if value is not None:
                    records[value.value.tenant, value.value.name] = value.value
        self._records, self._revision = records, revision
        logger.info("registry read", extra={"revision": revision, "adapters": len(records)})

    async def _apply(self, event: AdapterEvent) -> None:
        async with self._changing:
            found = await self._store.get(keys.adapter(event.tenant, event.name), AdapterRecord)
            if found is None:
                self._records.pop((event.tenant, event.name), None)
            else:
                self._records[event.tenant, event.name] = found.value
            self._advance(event.revision)

    def _advance(self, revision: int) -> None:
        """Step on by one change; after a gap leave the revision behind, so that the next look reads all."""
        if self._revision is not None and revision == self._revision + 1:
            self._revision = revision


def _cannot_read(error: Internal) -> None:
    """A record that is not one: the mirror stands still and serves what it knows until a person has mended it."""
    logger.error("registry unreadable", extra={"reason": error.message})


def _batches(members: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(members), READ_BATCH):
        yield members[start : start + READ_BATCH]
