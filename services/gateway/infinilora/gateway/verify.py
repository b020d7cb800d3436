"""Whether a packed file in the store is still what was written: every range read and hashed. Blocking."""

from collections.abc import Iterator

import msgspec

from infinilora.protocol import keys
from infinilora.protocol.adapter import SiteEntry
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import BlobStore
from infinilora.weights.packed import PackedHeader, verify

READ_BYTES = 8 << 20
MAX_FAULTS = 20
"""Faults that a report names; `num_faults` counts all."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `is_whole`: the header has the digest, the size is right, every block has its hash."""

    digest: Digest
    is_whole: bool
    num_bytes: int
    num_blocks: int
    num_faults: int
    faults: tuple[str, ...]


def verify_packed(blobs: BlobStore, digest: Digest) -> Verified:
    """Read all of it. Raises Unavailable when the store does not answer: that is no fault of the file."""
    name = keys.packed(digest)
    try:
        header = _header(blobs, name, digest)
    except AdapterFailed as error:
        return Verified(digest=digest, is_whole=False, num_bytes=0, num_blocks=0, num_faults=1, faults=(error.message,))
    faults: list[str] = []
    num_faults = num_blocks = 0
    for entry in header.manifest.sites:
        for block, data in _blocks(blobs, name, header.data_start, entry):
            num_blocks += 1
            try:
                verify(entry, block, data)
            except AdapterFailed as error:
                num_faults += 1
                faults += [error.message] if len(faults) < MAX_FAULTS else []
    return Verified(
        digest=digest,
        is_whole=num_faults == 0,
        num_bytes=header.file_bytes,
        num_blocks=num_blocks,
        num_faults=num_faults,
        faults=tuple(faults),
    )


def _header(blobs: BlobStore, name: str, digest: Digest) -> PackedHeader:
    blob = blobs.stat(name)
    if blob is None:
        raise AdapterFailed("packed file: found nothing in the store; wanted the file of this digest")
    first = blobs.get_range(name, 0, min(8, blob.size))
    header = PackedHeader.parse(blobs.get_range(name, 0, min(PackedHeader.num_bytes(first), blob.size)))
    if header.digest != digest:
        raise AdapterFailed(f"packed file: header: found digest {header.digest}; wanted {digest}")
    if blob.size != header.file_bytes:
        raise AdapterFailed(f"packed file: found {blob.size} bytes; wanted {header.file_bytes}")
    return header


def _blocks(blobs: BlobStore, name: str, data_start: int, entry: SiteEntry) -> Iterator[tuple[int, memoryview]]:
    """Every block of a site with its number, read several at a time where they are small."""
    block_bytes = entry.num_bytes // entry.num_blocks
    step = max(1, READ_BYTES // block_bytes)
    for first in range(0, entry.num_blocks, step):
        count = min(step, entry.num_blocks - first)
        offset = data_start + entry.offset + first * block_bytes
        data = memoryview(blobs.get_range(name, offset, count * block_bytes))
        for index in range(count):
            yield first + index, data[index * block_bytes : (index + 1) * block_bytes]
