"""Makes adapters of files.

Order is everything: the files are packed and checked, then the packed file is in the store, and only then does the
name point to the new digest. Whoever is interrupted in between has changed nothing that counts.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from infinilora.gateway.bases import BaseShelf
from infinilora.gateway.catalog import Catalog
from infinilora.gateway.declared import Policy, check_declared
from infinilora.gateway.ingest import Ask, IngestLimits, pack_adapter
from infinilora.gateway.ledger import Ledger, Outcome
from infinilora.gateway.verify import Verified, verify_packed
from infinilora.gateway.versions import Content
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterWarning
from infinilora.protocol.errors import InfiniLoraError, Overloaded
from infinilora.protocol.ids import Digest, Fingerprint, check_name
from infinilora.protocol.ingest import IngestReport
from infinilora.runtime.blobs import BlobStore
from infinilora.weights.reference import reference_file

logger = logging.getLogger(__name__)

MAX_WAITING = 32
"""Adapters that may wait to be read; each holds its upload meanwhile."""

COMPARED_BYTES = 8 << 20

Place = Callable[[Path], Path]
"""Puts an adapter's files below an empty directory, or finds them elsewhere; gives the directory they are in.
Blocking."""


class Wish(NamedTuple):
    """What a caller wants a name to hold. `source` is shown to whoever lists it; `narrow` is a dtype to round to."""

    tenant: str
    name: str
    base: str | None
    replace: bool
    source: str
    place: Place
    narrow: str = ""


class IngestPlace(NamedTuple):
    """Where files are read and packed, within which limits, and how many adapters at a time."""

    scratch: Path
    limits: IngestLimits
    max_ingests: int


class Adapters:
    """Creates adapters; the ledger keeps their names."""

    def __init__(
        self,
        *,
        blobs: BlobStore,
        ledger: Ledger,
        catalog: Catalog,
        shelf: BaseShelf,
        ingest: IngestPlace,
        ask: Ask,
        policy: Policy,
    ) -> None:
        self._blobs = blobs
        self._ledger = ledger
        self._catalog = catalog
        self._shelf = shelf
        self._ingest = ingest
        self._ask = ask
        self._policy = policy
        self._ingests = asyncio.Semaphore(ingest.max_ingests)
        self._num_ingests = 0

    async def create(self, wish: Wish) -> Outcome:
        """Make the wish true. The same content under the same name changes nothing. Errors name the adapter."""
        check_name(wish.name)
        try:
            return await self._create(wish)
        except InfiniLoraError as error:
            if f"'{wish.name}'" not in error.message:
                error.message = f"adapter '{wish.name}': {error.message}"
            raise

    async def _create(self, wish: Wish) -> Outcome:
        self._catalog.check_free(wish.name)
        base = self._catalog.base_for_adapter(wish.base)
        await self._ledger.check_there()  # no work for an answer that could not be kept
        card = (await self._shelf.get(base)).card
        async with self._turn(), self._scratch() as work:
            directory = await asyncio.to_thread(wish.place, work / "files")
            packed, path = await pack_adapter(
                directory, card, work, self._ingest.limits, narrow=wish.narrow, ask=self._ask
            )
            notes = check_declared(packed.declared_base, base, self._catalog.known_bases(), self._policy)
            await self._ledger.watch(packed.digest)  # whoever is interrupted or refused from here on leaves nothing
            await self._keep(packed, path, compares=True)
            await self._ledger.watch(packed.digest)  # and anew: writing may take longer than a watch lasts
            outcome = await self._ledger.point(wish.tenant, wish.name, _content(wish, base, packed, notes))
            # What was in the store already may have been collected just before the name pointed to it; not after.
            await self._keep(packed, path)
        logger.info(
            "adapter registered" if outcome.is_changed else "adapter unchanged",
            extra={"adapter_id": packed.digest, "tenant": wish.tenant, "adapter_name": wish.name},
        )
        return outcome

    async def verify(self, digest: Digest) -> Verified:
        """Read, hash and test a packed file as the store has it now; in turn with the ingests."""
        async with self._turn():
            return await asyncio.to_thread(verify_packed, self._blobs, digest)

    async def _keep(self, packed: IngestReport, path: Path, *, compares: bool = False) -> None:
        """Have the packed file in the store, and in its whole length; what it is tested with later, first.

        `compares`: what is there already may be damaged at its right length, whether or not anybody has noticed.
        """
        for name, file in ((keys.reference(packed.digest), reference_file(path)), (keys.packed(packed.digest), path)):
            await asyncio.to_thread(self._put, name, file, compares=compares)

    def _put(self, name: str, path: Path, *, compares: bool) -> None:
        blob = self._blobs.stat(name)
        is_whole = blob is not None and blob.size == path.stat().st_size
        if not is_whole or (compares and not self._is_equal(name, path)):
            self._blobs.put_file(name, path, if_absent=blob is None)

    def _is_equal(self, name: str, path: Path) -> bool:
        """Whether an object of this length holds what the file does."""
        offset = 0
        with path.open("rb") as file:
            while wanted := file.read(COMPARED_BYTES):
                try:
                    found = self._blobs.get_range(name, offset, len(wanted))
                except FileNotFoundError:
                    return False
                if found != wanted:
                    return False
                offset += len(wanted)
        return True

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

    @asynccontextmanager
    async def _scratch(self) -> AsyncIterator[Path]:
        """A directory of one ingest's own, gone afterwards."""
        work = Path(await asyncio.to_thread(self._make_scratch))
        try:
            yield work
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    def _make_scratch(self) -> str:
        self._ingest.scratch.mkdir(parents=True, exist_ok=True)
        work = tempfile.mkdtemp(prefix="ingest-", dir=self._ingest.scratch)
        (Path(work) / "files").mkdir()
        return work


def _content(wish: Wish, base: Fingerprint, packed: IngestReport, notes: tuple[AdapterWarning, ...]) -> Content:
    return Content(
        base=base,
        digest=packed.digest,
        source=wish.source,
        num_bytes=packed.manifest.data_bytes,
        max_rank=packed.manifest.max_rank,
        num_tensors=2 * packed.num_pairs,
        may_replace=wish.replace,
        warnings=(*packed.warnings, *notes),
        narrowed=packed.manifest.dtype if packed.manifest.narrowed_from else "",
        narrow_error=packed.narrow_error,
        declared_base=packed.declared_base,
    )
