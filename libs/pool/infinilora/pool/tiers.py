"""Where an adapter's bytes come from: the host's memory, else its disk cache, else the object store, by ranges.

    HostTier  --copy-->
    DiskCache --read-->  verified layer in the pool's memory  <--ranged GET--  BlobStore
        ^--------- both written as it passes --------------------------------------'

Every block is checked against its sha256 as it is read from disk or store: a wrong cache file is dropped and the store
asked instead, a wrong store object is `AdapterFailed`. What is *near* never waits for the network; what is not there
raises `NotNear`, and the caller asks again where it may wait. Blocking: called from loader threads. Knows no slot.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinilora.pool.backoff import NotStored
from infinilora.pool.cache import CachedFile, CacheWriter, DiskCache
from infinilora.pool.host import HostAdapter, HostTier
from infinilora.pool.share import Piece, Share
from infinilora.protocol import keys
from infinilora.protocol.adapter import SiteEntry
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.runtime.blob_store import BlobStore
from infinilora.weights.packed import PackedHeader, packed_ranges, verify

logger = logging.getLogger(__name__)

FIRST_READ_BYTES = 1 << 20
"""A ranged GET asks for at least so much while there is more, twice as much each time, as far as the store is read
ahead: the first layer comes soon, and an adapter of 10 MB in four requests."""
LENGTH_BYTES = 8


SHARED_BYTES = 1 << 20
"""From so many bytes on, two threads verify a layer."""
PIECE_BYTES = 1 << 18
"""Of a read that is hashed at once; what a core keeps beside other things."""
NUM_HELPERS = 2


class NotNear(Exception):
    """The bytes are not on this host, or no longer: the next call will ask the store."""


class _StoreReader:
    """Ranges of one object of the store, read ahead where that saves something. Holds at most one range."""

    def __init__(self, blobs: BlobStore, digest: Digest) -> None:
        self._blobs = blobs
        self._name = keys.packed(digest)
        self._start = 0
        self._held = b""
        self._ahead_bytes = min(FIRST_READ_BYTES, blobs.most_ahead_bytes)

    def read(self, offset: int, num_bytes: int, most_bytes: int | None = None) -> memoryview:
        """Bytes [offset, offset + num_bytes); shorter only where the object ends. Raises Unavailable.

        `most_bytes`: how far from `offset` on it may read ahead; None: as far as the store likes.
        """
        skip = offset - self._start
        if skip < 0 or skip + num_bytes > len(self._held):
            try:
                ahead = self._ahead_bytes if most_bytes is None else min(self._ahead_bytes, most_bytes)
                self._held = self._blobs.get_range(self._name, offset, max(num_bytes, ahead))
            except FileNotFoundError as error:
                raise self._not_stored() from error
            self._ahead_bytes = min(2 * self._ahead_bytes, self._blobs.most_ahead_bytes)
            self._start, skip = offset, 0
        return memoryview(self._held)[skip : skip + num_bytes]

    def read_into(self, offset: int, into: memoryview, most_bytes: int | None = None) -> int:
        """As `read`, into memory that is there; how many bytes came."""
        if not self._ahead_bytes:
            try:
                return self._blobs.read_into(self._name, offset, into)
            except FileNotFoundError as error:
                raise self._not_stored() from error
        data = self.read(offset, len(into), most_bytes)
        np.copyto(np.frombuffer(into[: len(data)], np.uint8), np.frombuffer(data, np.uint8))  # no GIL
        return len(data)

    def _not_stored(self) -> NotStored:
        return NotStored(f"{self._name} is not in the object store")


class _Piece(NamedTuple):
    """Blocks that lie side by side, few enough bytes to be hashed while a core still has them in its cache."""

    offset: int
    """In the file."""
    data: memoryview
    blocks: list[tuple[SiteEntry, int, memoryview]]


class PackedSource:
    """One packed adapter, open. Used by one thread at a time; `close` it."""

    def __init__(
        self, tiers: "Tiers", whole: PackedHeader, store: _StoreReader, near: HostAdapter | CachedFile | None = None
    ) -> None:
        """`near`: where it is read; None for the store. It is closed with the source."""
        self.whole = whole
        self._cut = tiers.share.cut(whole) if tiers.share else None
        self.header = self._cut.kept if self._cut else whole
        """Of what this process holds, as it lies in memory."""
        self._read = self._cut.header if self._cut else whole
        """As it lies in the cache: a share is closed up everywhere but in the store (share.py)."""
        self._tiers = tiers
        self._digest = whole.digest
        self._store = store
        self._host = near if isinstance(near, HostAdapter) else None
        self._cached = near if isinstance(near, CachedFile) else None
        self._writer: CacheWriter | None = None
        self._is_from_host = self._host is not None
        self._may_begin_host = self._host is None

    @property
    def tier(self) -> str:
        """Where its bytes come from: `host`, `disk` or `store`."""
        if self._is_from_host:
            return "host"
        return "disk" if self._cached else "store"

    def layer_span(self, layer: int) -> tuple[int, int]:
        """(offset in the file, bytes) of a layer's sites, which lie side by side; 0 bytes where nothing is adapted."""
        ranges = packed_ranges(self._read, layer)
        if not ranges:
            return self._read.data_start, 0
        start = ranges[0][1]
        return start, ranges[-1][1] + ranges[-1][2] - start

    def hold_layer(self, layer: int) -> Tensor | None:
        """The layer as it lies in the host tier, verified; None where that has no place for it. Raises as `read_layer`.

        uint8 [bytes], valid until `close`.
        """
        if self._may_begin_host and self._tiers.host:
            self._host = self._tiers.host.begin(self._digest, self.header, self.whole)
        self._may_begin_host = False
        if self._host is None:
            return None
        held = self._host.layer(layer)
        if not self._is_from_host:
            self.read_layer(layer, held.numpy().data)
        return held

    def read_layer(self, layer: int, into: memoryview) -> None:
        """Fill `into` with the layer as it is kept, verified, from disk or store.

        Raises NotNear (a cached file was wrong; the next call asks the store), AdapterFailed, Unavailable (try again).
        """
        start, num_bytes = self.layer_span(layer)
        if num_bytes == 0:
            return
        if self._cut is None or self._cut.kept is self._cut.header:
            self._read_whole(layer, start, into)
            return
        read = torch.empty(num_bytes, dtype=torch.uint8)
        self._read_whole(layer, start, read.numpy().data)
        if len(into):
            self._cut.trim(layer, read, torch.frombuffer(into, dtype=torch.uint8))

    def _read_whole(self, layer: int, start: int, into: memoryview) -> None:
        if self._cached:
            self._read_cached(self._cached, layer, start, into)
            return
        at = 0
        for piece in self._cut.pieces(layer) if self._cut else (Piece(start, len(into)),):
            most_bytes = self._cut.may_read(piece.offset) if self._cut else None
            found = self._store.read_into(piece.offset, into[at : at + piece.num_bytes], most_bytes)
            if found != piece.num_bytes:
                raise AdapterFailed(
                    f"packed file of {self._digest} ends within layer {layer}: "
                    f"found {found} bytes, wanted {piece.num_bytes}"
                )
            at += piece.num_bytes
        self._tiers.verify(self._pieces(layer, start, into))
        if self._writer:
            self._writer.write(start, into)

    def begin_caching(self) -> None:
        """Write what comes from the store into the cache, header first. Before the first layer is read."""
        self._writer = self._tiers.cache.writer(self._tiers.key(self._digest), self._read.file_bytes)
        if self._writer:
            self._writer.write(0, self._store.read(0, self._read.data_start))

    def commit(self) -> None:
        """Every layer has been read: keep the file in the tiers that it is not from."""
        if self._writer:
            self._writer.commit()
        if self._host and self._tiers.host and not self._is_from_host:
            self._tiers.host.keep(self._host)

    def close(self) -> None:
        if self._host and self._tiers.host:
            self._tiers.host.close(self._host)
            self._host = None
        if self._cached:
            self._cached.close()
            self._cached = None
        if self._writer:
            self._writer.abandon()

    def _read_cached(self, cached: CachedFile, layer: int, start: int, into: memoryview) -> None:
        def read(piece: _Piece) -> None:
            if not cached.read_into(piece.offset, piece.data):
                raise NotNear

        try:
            self._tiers.verify(self._pieces(layer, start, into), read)
        except AdapterFailed as error:
            logger.warning("cache file corrupt", extra={"adapter_id": self._digest, "reason": error.message})
        except NotNear:
            pass  # told by the file
        else:
            return
        self._tiers.cache.drop(self._tiers.key(self._digest))
        cached.close()
        self._cached = None
        raise NotNear

    def _pieces(self, layer: int, start: int, data: memoryview) -> list[_Piece]:
        pieces: list[_Piece] = []
        blocks: list[tuple[SiteEntry, int, memoryview]] = []
        first = at = 0
        for entry, _, num_bytes in packed_ranges(self._read, layer):
            block_bytes = num_bytes // entry.num_blocks
            for block in range(entry.num_blocks):
                blocks.append((entry, block, data[at : at + block_bytes]))
                at += block_bytes
                if at - first >= PIECE_BYTES:
                    pieces.append(_Piece(start + first, data[first:at], blocks))
                    first, blocks = at, []
        if blocks:
            pieces.append(_Piece(start + first, data[first:at], blocks))
        return pieces


class Tiers:
    """Opens adapters by digest, and forgets them. Thread-safe."""

    def __init__(
        self, blobs: BlobStore, cache: DiskCache, host: HostTier | None = None, share: Share | None = None
    ) -> None:
        """`share`: what of each adapter this process holds; None: all of it."""
        self._blobs = blobs
        self.cache = cache
        self.host = host
        self.share = share
        self._helpers = ThreadPoolExecutor(NUM_HELPERS, "verifier")

    def key(self, digest: Digest) -> Digest:
        """What this process calls an adapter in a cache that others use too."""
        return self.share.key(digest) if self.share else digest

    def close(self) -> None:
        """No source is open."""
        self._helpers.shutdown()

    def verify(self, pieces: Sequence[_Piece], read: Callable[[_Piece], None] | None = None) -> None:
        """Raise AdapterFailed unless every block is what was packed. `read` fills a piece before it is looked at.

        Reading and hashing is what a load from this host waits for, so of many bytes a helper takes half.
        """
        if sum(len(piece.data) for piece in pieces) < SHARED_BYTES:
            _verify_each(pieces, read)
            return
        others = self._helpers.submit(_verify_each, pieces[1::2], read)
        try:
            _verify_each(pieces[::2], read)
        finally:
            others.result()

    def open_near(self, digest: Digest) -> PackedSource:
        """From this host's memory or disk. Raises NotNear."""
        store = _StoreReader(self._blobs, digest)
        if self.host and (held := self.host.open(digest)):
            return PackedSource(self, held.whole, store, held)
        cached = self.cache.open(self.key(digest))
        if cached is None:
            raise NotNear
        try:
            header = _read_header(digest, lambda at, n: _read_exactly(cached, at, n))
        except AdapterFailed as error:
            logger.warning("cache file corrupt", extra={"adapter_id": digest, "reason": error.message})
            self.cache.drop(self.key(digest))
            cached.close()
            raise NotNear from error
        return PackedSource(self, header, store, cached)

    def open_far(self, digest: Digest) -> PackedSource:
        """From the store. Raises AdapterFailed, or Unavailable (try again)."""
        store = _StoreReader(self._blobs, digest)
        header = _read_header(digest, lambda at, n: bytes(store.read(at, n)))
        source = PackedSource(self, header, store)
        source.begin_caching()
        return source

    def used_bytes(self) -> dict[str, int]:
        """What they hold: `disk` (of all processes that share the directory) and `host`."""
        return {"disk": self.cache.used_bytes, "host": self.host.used_bytes if self.host else 0}

    def sweep(self) -> int:
        """Remove from the disk what the store has no more: who was away when it was deleted was not told. How many.

        Raises Unavailable, and has removed a part then.
        """
        num_removed = 0
        for name in self.cache.names():
            digest = self._digest_of(name)
            if digest is not None and self._blobs.stat(keys.packed(digest)) is None:
                logger.info("cached adapter is not in the store any more", extra={"adapter_id": digest})
                num_removed += self.cache.forget(name)
        return num_removed

    def _digest_of(self, name: Digest) -> Digest | None:
        """Of the adapter that a cached file is, or is a share of; None where it is gone, or cannot be read."""
        cached = self.cache.open(name, is_use=False)
        if cached is None:
            return None
        try:
            return _parsed(lambda at, n: _read_exactly(cached, at, n)).digest
        except AdapterFailed:  # whoever opens it drops it
            return None
        finally:
            cached.close()

    def forget(self, digest: Digest) -> None:
        """Remove it from every tier of this host. What is open is read to its end. Idempotent."""
        if self.host:
            self.host.forget(digest)
        self.cache.forget(self.key(digest))


def _parsed(read: Callable[[int, int], bytes]) -> PackedHeader:
    return PackedHeader.parse(read(0, PackedHeader.num_bytes(read(0, LENGTH_BYTES))))


def _read_header(digest: Digest, read: Callable[[int, int], bytes]) -> PackedHeader:
    header = _parsed(read)
    if header.digest != digest:
        raise AdapterFailed(f"packed file of {digest}: its manifest is that of {header.digest}")
    return header


def _read_exactly(file: CachedFile, offset: int, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    if not file.read_into(offset, memoryview(data)):
        raise AdapterFailed(f"the file ends before byte {offset + num_bytes}")
    return bytes(data)


def _verify_each(pieces: Sequence[_Piece], read: Callable[[_Piece], None] | None) -> None:
    for piece in pieces:
        if read:
            read(piece)
        for entry, number, data in piece.blocks:
            verify(entry, number, data)
