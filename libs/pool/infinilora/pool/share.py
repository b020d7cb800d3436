"""What one shard of a group holds of an adapter, and where it lies in the packed file.

    packed file     | header | layer 0: all sites, all experts | layer 1 ... |
    a share of it   | header | its dense sites, its experts    | ...         |     closed up, in the same order

A share is read as a packed file of its own whose blocks happen to be somewhere else in the store: `Cut.header` says
how it lies closed up (in a cache, in host memory, in a layer of the pool), `Cut.pieces` where each part comes from.
Each block keeps its sha256. Experts of a cut site are numbered from the first that is held.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from infinilora.protocol.adapter import Manifest, SiteEntry
from infinilora.protocol.ids import Digest, digest_of
from infinilora.protocol.shards import Sharding
from infinilora.weights.packed import PackedHeader


class Piece(NamedTuple):
    """Bytes that lie together in the store."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One adapter as one shard holds it. `origins[n]`: where entry n of the closed-up manifest begins in the store."""

    header: PackedHeader
    origins: tuple[int, ...]
    runs: tuple[Piece, ...]
    """Everything that is held, neighbours as one: in order, none touches the next."""

    def pieces(self, layer: int) -> Iterator[Piece]:
        """Where a layer's sites are in the store, in the order in which they lie closed up."""
        for entry, origin in zip(self.header.manifest.sites, self.origins, strict=True):
            if entry.layer == layer:
                yield Piece(origin, entry.num_bytes)

    def may_read(self, offset: int) -> int:
        """How many bytes from `offset` on are held without a gap."""
        at = bisect_right(self.runs, offset, key=lambda run: run.offset) - 1
        return self.runs[at].offset + self.runs[at].num_bytes - offset


class Share:
    """One shard's part of every adapter of a base."""

    def __init__(self, sharding: Sharding, shard: int) -> None:
        self._sharding = sharding
        self._shard = shard

    def key(self, digest: Digest) -> Digest:
        """What this part of an adapter is called in a cache that other shards use too."""
        return digest_of(f"{digest} shard {self._shard} of {self._sharding.shape}".encode())

    def cut(self, header: PackedHeader) -> Cut:
        entries, origins, end = list[SiteEntry](), list[int](), 0
        for entry in header.manifest.sites:
            held = self._held(entry)
            if not held:
                continue
            block_bytes = entry.num_bytes // entry.num_blocks
            origins.append(header.data_start + entry.offset + held.start * block_bytes)
            entries.append(
                msgspec.structs.replace(
                    entry,
                    num_experts=len(held) if entry.num_experts else 0,
                    offset=end,
                    num_bytes=len(held) * block_bytes,
                    sha256=entry.sha256[held.start : held.stop],
                )
            )
            end += entries[-1].num_bytes
        manifest = msgspec.structs.replace(header.manifest, sites=tuple(entries))
        return Cut(replace(header, manifest=manifest), tuple(origins), tuple(_joined(origins, entries)))

    def owns(self, layer: int, site: int) -> bool:
        """Whether this shard computes any of a site."""
        return self._sharding.owns(self._shard, layer, site)

    def layer_bytes(self, manifest: Manifest) -> tuple[int, ...]:
        """Bytes that are held of each layer; lm_head is the last."""
        sizes = [0] * (manifest.num_layers + 1)
        for entry in manifest.sites:
            sizes[entry.layer] += len(self._held(entry)) * (entry.num_bytes // entry.num_blocks)
        return tuple(sizes)

    def _held(self, entry: SiteEntry) -> range:
        """The blocks of a site that are held: experts, or the one block of a dense site."""
        if entry.num_experts:
            return self._sharding.experts(self._shard, entry.layer, entry.num_experts)
        return range(self._sharding.owns(self._shard, entry.layer, entry.site))


def _joined(origins: list[int], entries: list[SiteEntry]) -> Iterator[Piece]:
    """The runs of neighbouring pieces."""
    start = end = -1
    for origin, entry in zip(origins, entries, strict=True):
        if origin != end:
            if end > start:
                yield Piece(start, end - start)
            start = origin
        end = origin + entry.num_bytes
    if end > start:
        yield Piece(start, end - start)
