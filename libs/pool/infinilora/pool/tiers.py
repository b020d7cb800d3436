"""Where an adapter's bytes come from: the local disk cache if it has them, else the object store, by ranges.

    DiskCache  --read-->  verified layer in the pool's memory  <--ranged GET--  BlobStore
        ^------------------- written as it passes ------------------------------'

Every block is checked against its sha256 as it is read, wherever it came from: a wrong cache file is dropped and the
store asked instead, a wrong store object is `AdapterFailed`. The operating system's page cache is the host tier.
Blocking: called from loader threads. Knows no slot.
"""

import logging
from collections.abc import Callable

from infinilora.pool.cache import CachedFile, CacheWriter, DiskCache
from infinilora.protocol import keys
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import BlobStore
from infinilora.weights.packed import PackedHeader, packed_ranges, verify

logger = logging.getLogger(__name__)

FIRST_READ_BYTES = 1 << 20
MOST_READ_BYTES = 8 << 20
"""A ranged GET asks for at least so much while there is more, twice as much each time: the first layer comes soon, and
an adapter of 10 MB in four requests."""
LENGTH_BYTES = 8


class _StoreReader:
    """Ranges of one object of the store, read ahead. Holds at most one range."""

    def __init__(self, blobs: BlobStore, digest: Digest) -> None:
        self._blobs = blobs
        self._name = keys.packed(digest)
        self._start = 0
        self._held = b""
        self._ahead_bytes = FIRST_READ_BYTES

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Bytes [offset, offset + num_bytes); shorter only where the object ends. Raises Unavailable."""
        skip = offset - self._start
        if skip < 0 or skip + num_bytes > len(self._held):
            try:
                self._held = self._blobs.get_range(self._name, offset, max(num_bytes, self._ahead_bytes))
            except FileNotFoundError as error:
                raise AdapterFailed(f"{self._name} is not in the object store: {error}") from error
            self._ahead_bytes = min(2 * self._ahead_bytes, MOST_READ_BYTES)
            self._start, skip = offset, 0
        return memoryview(self._held)[skip : skip + num_bytes]


class PackedSource:
    """One packed adapter, open. Used by one thread at a time; `close` it."""

    def __init__(
        self, digest: Digest, header: PackedHeader, cached: CachedFile | None, store: _StoreReader, cache: DiskCache
    ) -> None:
        self.digest = digest
        self.header = header
        self._cached = cached
        self._store = store
        self._cache = cache
        self._writer: CacheWriter | None = None

    @property
    def tier(self) -> str:
        """Where its bytes come from: `disk` or `store`."""
        return "disk" if self._cached else "store"

    def layer_span(self, layer: int) -> tuple[int, int]:
        """(offset in the file, bytes) of a layer's sites, which lie side by side; 0 bytes where nothing is adapted."""
        ranges = packed_ranges(self.header, layer)
        if not ranges:
            return self.header.data_start, 0
        start = ranges[0][1]
        return start, ranges[-1][1] + ranges[-1][2] - start

    def read_layer(self, layer: int, into: memoryview) -> None:
        """Fill `into` with the layer's bytes, verified. Raises AdapterFailed, or Unavailable (try again)."""
        start, num_bytes = self.layer_span(layer)
        if num_bytes == 0 or self._read_cached(layer, start, into):
            return
        data = self._store.read(start, num_bytes)
        if len(data) != num_bytes:
            raise AdapterFailed(
                f"packed file of {self.digest} ends within layer {layer}: found {len(data)} bytes, wanted {num_bytes}"
            )
        into[:] = data
        self._verify(layer, into)
        if self._writer:
            self._writer.write(start, into)

    def begin_caching(self) -> None:
        """Write what comes from the store into the cache, header first. Before the first `read_layer`."""
        if self._cached is None:
            self._writer = self._cache.writer(self.digest, self.header.file_bytes)
        if self._writer:
            self._writer.write(0, self._store.read(0, self.header.data_start))

    def commit(self) -> None:
        """Every layer has been read: keep the file in the cache, if it is not from there."""
        if self._writer:
            self._writer.commit()

    def close(self) -> None:
        if self._cached:
            self._cached.close()
            self._cached = None
        if self._writer:
            self._writer.abandon()

    def _read_cached(self, layer: int, start: int, into: memoryview) -> bool:
        if self._cached is None:
            return False
        try:
            if self._cached.read_into(start, into):
                self._verify(layer, into)
                return True
        except AdapterFailed as error:
            logger.warning("cache file corrupt", extra={"adapter_id": self.digest, "reason": error.message})
        self._cache.drop(self.digest)
        self._cached.close()
        self._cached = None
        return False

    def _verify(self, layer: int, data: memoryview) -> None:
        at = 0
        for entry, _, num_bytes in packed_ranges(self.header, layer):
            block_bytes = num_bytes // entry.num_blocks
            for block in range(entry.num_blocks):
                verify(entry, block, data[at : at + block_bytes])
                at += block_bytes


class Tiers:
    """Opens adapters by digest. Thread-safe."""

    def __init__(self, blobs: BlobStore, cache: DiskCache) -> None:
        self._blobs = blobs
        self._cache = cache

    def open(self, digest: Digest) -> PackedSource:
        """Read and check the header. Raises AdapterFailed, or Unavailable (try again)."""
        store = _StoreReader(self._blobs, digest)
        if cached := self._cache.open(digest):
            try:
                header = _read_header(digest, lambda at, n: _read_exactly(cached, at, n))
            except AdapterFailed as error:
                logger.warning("cache file corrupt", extra={"adapter_id": digest, "reason": error.message})
                self._cache.drop(digest)
                cached.close()
            else:
                return PackedSource(digest, header, cached, store, self._cache)
        header = _read_header(digest, lambda at, n: bytes(store.read(at, n)))
        source = PackedSource(digest, header, None, store, self._cache)
        source.begin_caching()
        return source


def _read_header(digest: Digest, read: Callable[[int, int], bytes]) -> PackedHeader:
    header = PackedHeader.parse(read(0, PackedHeader.num_bytes(read(0, LENGTH_BYTES))))
    if header.digest != digest:
        raise AdapterFailed(f"packed file of {digest}: its manifest is that of {header.digest}")
    return header


def _read_exactly(file: CachedFile, offset: int, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    if not file.read_into(offset, memoryview(data)):
        raise AdapterFailed(f"the file ends before byte {offset + num_bytes}")
    return bytes(data)
