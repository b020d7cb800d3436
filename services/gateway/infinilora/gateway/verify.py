"""Whether a packed file in the store is still what was written, and still means what its files meant. Blocking.

Every range is read and hashed, and where ingest has kept reference answers (`weights.reference`), the delta of every
part of every block is computed anew and held against them.
"""

from collections.abc import Iterator

import msgspec

from infinilora.protocol import keys
from infinilora.protocol.adapter import SiteEntry
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import BlobStore
from infinilora.weights.packed import PackedHeader, verify
from infinilora.weights.reference import Reference, Retest, decode_reference

READ_BYTES = 8 << 20
MAX_FAULTS = 20
"""Faults that a report names; `num_faults` counts all."""
_GONE = "packed file: found nothing in the store; wanted the file of this digest"


class Tested(msgspec.Struct, frozen=True, kw_only=True):
    """How many parts of blocks were computed anew, and the largest error of any, of its delta's size."""

    parts: int
    error: float


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `is_whole`: the header has the digest, the size is right, every block has its hash and delta."""

    digest: Digest
    is_whole: bool
    num_bytes: int = 0
    num_blocks: int = 0
    num_faults: int
    faults: tuple[str, ...]
    tested: Tested | None = None
    """None: its files were packed before reference answers were kept, or the header cannot be read."""


def verify_packed(blobs: BlobStore, digest: Digest) -> Verified:
    """Read all of it. Raises Unavailable when the store does not answer: that is no fault of the file."""
    faults = _Faults()
    try:
        packed = _Packed(blobs, digest)
    except AdapterFailed as error:
        faults.add(error.message)
        return faults.report(digest)
    retest = _retest(blobs, packed, faults)
    num_blocks = 0
    try:
        for entry in packed.header.manifest.sites:
            for block, data in packed.blocks(entry):
                num_blocks += 1
                _look(entry, block, data, retest, faults)
    except AdapterFailed as error:  # it went away meanwhile
        faults.add(error.message)
        retest = None
    for fault in retest.missing() if retest else ():
        faults.add(fault)
    tested = Tested(parts=retest.num_compared, error=retest.error) if retest else None
    return faults.report(digest, num_bytes=packed.header.file_bytes, num_blocks=num_blocks, tested=tested)


class _Faults:
    """Counts all, keeps the words of the first."""

    def __init__(self) -> None:
        self._num = 0
        self._said: list[str] = []

    def add(self, fault: str) -> None:
        self._num += 1
        if len(self._said) < MAX_FAULTS:
            self._said.append(fault)

    def report(
        self, digest: Digest, *, num_bytes: int = 0, num_blocks: int = 0, tested: Tested | None = None
    ) -> Verified:
        return Verified(
            digest=digest,
            is_whole=self._num == 0,
            num_bytes=num_bytes,
            num_blocks=num_blocks,
            num_faults=self._num,
            faults=tuple(self._said),
            tested=tested,
        )


def _look(entry: SiteEntry, block: int, data: memoryview, retest: Retest | None, faults: _Faults) -> None:
    try:
        verify(entry, block, data)
    except AdapterFailed as error:
        faults.add(error.message)
        if retest is not None:
            retest.skip(entry, block)  # one fault is told once
        return
    for fault in retest.faults(entry, block, data) if retest else ():
        faults.add(fault)


def _retest(blobs: BlobStore, packed: "_Packed", faults: _Faults) -> Retest | None:
    try:
        reference = _reference(blobs, packed.digest)
    except AdapterFailed as error:
        faults.add(error.message)
        return None
    return Retest(packed.header.manifest, reference) if reference else None


def _reference(blobs: BlobStore, digest: Digest) -> Reference | None:
    try:
        found = decode_reference(blobs.get(keys.reference(digest)))
    except FileNotFoundError:
        return None
    if found.digest != digest:
        raise AdapterFailed(f"reference answers: digest: found {found.digest}; wanted {digest}")
    return found


class _Packed:
    """A packed file in the store, in the state in which it was first met. Raises AdapterFailed once it is gone."""

    def __init__(self, blobs: BlobStore, digest: Digest) -> None:
        self.digest = digest
        self._blobs, self._name = blobs, keys.packed(digest)
        blob = blobs.stat(self._name)
        if blob is None:
            raise AdapterFailed(_GONE)
        self._etag = blob.etag
        first = self._read(0, min(8, blob.size))
        self.header = PackedHeader.parse(self._read(0, min(PackedHeader.num_bytes(first), blob.size)))
        if self.header.digest != digest:
            raise AdapterFailed(f"packed file: header: found digest {self.header.digest}; wanted {digest}")
        if blob.size != self.header.file_bytes:
            raise AdapterFailed(f"packed file: found {blob.size} bytes; wanted {self.header.file_bytes}")

    def blocks(self, entry: SiteEntry) -> Iterator[tuple[int, memoryview]]:
        """Every block of a site with its number, read several at a time where they are small."""
        block_bytes = entry.num_bytes // entry.num_blocks
        step = max(1, READ_BYTES // block_bytes)
        for first in range(0, entry.num_blocks, step):
            count = min(step, entry.num_blocks - first)
            offset = self.header.data_start + entry.offset + first * block_bytes
            data = memoryview(self._read(offset, count * block_bytes))
            for index in range(count):
                yield first + index, data[index * block_bytes : (index + 1) * block_bytes]

    def _read(self, offset: int, num_bytes: int) -> bytes:
        try:
            return self._blobs.get_range(self._name, offset, num_bytes, etag=self._etag)
        except FileNotFoundError:
            raise AdapterFailed(_GONE) from None
