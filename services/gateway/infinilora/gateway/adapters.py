"""The registry's one writer: create, replace and delete adapters by compare-and-set.

Order is everything: the files are packed and checked, then the packed file is in the store, and only then
does the name point to the new digest. Whoever is interrupted in between has changed nothing that counts.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from infinilora.gateway.bases import BaseShelf
from infinilora.gateway.catalog import Catalog
from infinilora.gateway.ingest import IngestLimits, Packed, pack_adapter
from infinilora.gateway.registry import Registry
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import AdapterRecord, Manifest, VersionRecord
from infinilora.protocol.control import AdapterEvent
from infinilora.protocol.errors import AdapterNotFound, Conflict, InvalidRequest, Overloaded
from infinilora.protocol.ids import Fingerprint, check_name
from infinilora.runtime.blobs import BlobStore
from infinilora.runtime.bus import Bus
from infinilora.runtime.store import AddMember, Effect, Raise, RemoveMember, Store

logger = logging.getLogger(__name__)

MAX_WAITING = 32
"""Adapters that may wait to be read; each holds its upload meanwhile."""
MAX_RACES = 20
"""Times a change is tried again because somebody else has changed the same name meanwhile."""

Place = Callable[[Path], Path]
"""Puts an adapter's files below an empty directory, or finds them elsewhere; gives the directory they are in.
Blocking."""


class Wish(NamedTuple):
    """What a caller wants a name to hold. `source` is shown to whoever lists it."""

    tenant: str
    name: str
    base: str | None
    replace: bool
    source: str
    place: Place


class Outcome(NamedTuple):
    """A record, and whether this call has changed it."""

    record: AdapterRecord
    is_changed: bool


class IngestPlace(NamedTuple):
    """Where files are read and packed, within which limits, and how many adapters at a time."""

    scratch: Path
    limits: IngestLimits
    max_ingests: int


class Adapters:
    """Creates and deletes adapters."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: BlobStore,
        bus: Bus,
        registry: Registry,
        catalog: Catalog,
        shelf: BaseShelf,
        ingest: IngestPlace,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._bus = bus
        self._registry = registry
        self._catalog = catalog
        self._shelf = shelf
        self._ingest = ingest
        self._ingests = asyncio.Semaphore(ingest.max_ingests)
        self._num_ingests = 0

    async def create(self, wish: Wish) -> Outcome:
        """Make the wish true. The same content under the same name changes nothing."""
        check_name(wish.name)
        self._catalog.check_free(wish.name)
        base = self._catalog.base_for_adapter(wish.base)
        await self._store.counter(keys.REGISTRY_REVISION)  # no work for an answer that could not be kept
        packed = await self._pack(wish, base)
        outcome = await self._point(wish, base, packed)
        logger.info(
            "adapter registered" if outcome.is_changed else "adapter unchanged",
            extra={"adapter_id": packed.digest, "tenant": wish.tenant, "adapter_name": wish.name},
        )
        return outcome

    async def delete(self, tenant: str, name: str) -> AdapterRecord:
        """Forget the name. Requests that were admitted before keep their digest."""
        if self._catalog.is_base(name):
            raise InvalidRequest(f"'{name}' is a base model; only adapters can be deleted", param="name")
        key, member = keys.adapter(tenant, check_name(name)), f"{tenant}/{name}"
        for _ in range(MAX_RACES):
            found = await self._store.get(key, AdapterRecord)
            if found is None:
                raise AdapterNotFound(f"adapter '{name}' does not exist", param="name")
            swap = await self._store.delete_if(
                key, found.raw, also=[RemoveMember(keys.REGISTRY_INDEX, member), Raise(keys.REGISTRY_REVISION)]
            )
            if swap:
                await self._registry.drop(tenant, name, swap.counters[0])
                await self._announce("delete", found.value, swap.counters[0])
                return found.value
        raise Conflict(f"adapter '{name}' changes too fast to be deleted", param="name")

    async def _pack(self, wish: Wish, base: Fingerprint) -> Packed:
        """Read, check and pack the files, and put the packed file into the store."""
        card = (await self._shelf.get(base)).card
        async with self._turn():
            work = Path(await asyncio.to_thread(self._make_scratch))
            try:
                files = work / "files"
                directory = await asyncio.to_thread(wish.place, files)
                packed, path = await pack_adapter(directory, card, work, self._ingest.limits)
                await asyncio.to_thread(self._blobs.put_file, keys.packed(packed.digest), path, if_absent=True)
                return packed
            finally:
                await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """A place among those whose files are read now; some may wait for one, in order."""
        if self._num_ingests >= self._ingest.max_ingests + MAX_WAITING:
            raise Overloaded("too many adapters wait to be read", retry_after_s=5.0)
        self._num_ingests += 1
        try:
            async with self._ingests:
                yield
        finally:
            self._num_ingests -= 1

    def _make_scratch(self) -> str:
        self._ingest.scratch.mkdir(parents=True, exist_ok=True)
        work = tempfile.mkdtemp(prefix="ingest-", dir=self._ingest.scratch)
        (Path(work) / "files").mkdir()
        return work

    async def _point(self, wish: Wish, base: Fingerprint, packed: Packed) -> Outcome:
        """Let the name point to the digest, unless it does or may not."""
        key = keys.adapter(wish.tenant, wish.name)
        effects: list[Effect] = [
            AddMember(keys.REGISTRY_INDEX, f"{wish.tenant}/{wish.name}"),
            Raise(keys.REGISTRY_REVISION),
        ]
        for _ in range(MAX_RACES):
            found = await self._store.get(key, AdapterRecord)
            if found is not None and found.value.current == packed.digest:
                return Outcome(found.value, is_changed=False)
            if found is not None and found.value.base != base:
                raise Conflict(f"adapter '{wish.name}' belongs to another base model", param="name")
            if found is not None and not wish.replace:
                raise Conflict(
                    f"adapter '{wish.name}' exists with other content ({found.value.current[:19]}...); "
                    "send replace=true to make this its next version",
                    param="name",
                )
            record = next_record(found.value if found else None, wish, base, packed)
            swap = await self._store.compare_and_set(key, found.raw if found else None, record, also=effects)
            if swap:
                await self._registry.put(record, swap.counters[0])
                await self._announce("put", record, swap.counters[0])
                return Outcome(record, is_changed=True)
        raise Conflict(f"adapter '{wish.name}' changes too fast to be written", param="name")

    async def _announce(self, action: str, record: AdapterRecord, revision: int) -> None:
        event = AdapterEvent(
            action="put" if action == "put" else "delete",
            tenant=record.tenant,
            name=record.name,
            revision=revision,
            digest=record.current,
        )
        await self._bus.publish(subjects.ADAPTER_EVENTS, event)


def next_record(old: AdapterRecord | None, wish: Wish, base: Fingerprint, packed: Packed) -> AdapterRecord:
    """The record after this wish; content that was a version before becomes current again."""
    versions = old.versions if old else ()
    if all(version.digest != packed.digest for version in versions):
        versions = (
            *versions,
            VersionRecord(
                version=versions[-1].version + 1 if versions else 1,
                digest=packed.digest,
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
                source=wish.source,
                num_bytes=packed.manifest.data_bytes,
                max_rank=packed.manifest.max_rank,
                num_tensors=num_tensors(packed.manifest),
            ),
        )
    return AdapterRecord(
        tenant=wish.tenant,
        name=wish.name,
        base=base,
        revision=old.revision + 1 if old else 1,
        current=packed.digest,
        versions=versions,
        pinned=old.pinned if old else False,
        fallback=old.fallback if old else "none",
    )


def num_tensors(manifest: Manifest) -> int:
    """A and B matrices that were matched to the base model, each expert's counted."""
    return sum(2 * len(site.parts) * site.num_blocks for site in manifest.sites)
