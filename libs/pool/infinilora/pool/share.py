"""What one process holds of every adapter, as a shard of a group or of an engine, and where it lies in the packed file.

    packed file     | header | layer 0: all sites, all experts | layer 1 ... |
    a share of it   | header | its dense sites, its experts    | ...         |     closed up, in the same order
    as it is kept            | its columns of these sites      | ...         |     in memory (trim.py)

A share is read as a packed file of its own whose blocks happen to be somewhere else in the store: `Cut.header` says
how it lies closed up (in a cache), `Cut.pieces` where each part comes from, `Cut.kept` how it lies in memory (of the
host, of the pool). Each block keeps its sha256. Experts of a cut site are numbered from the first that is held.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
from torch import Tensor

from infinilora.pool.slices import WHOLE, SiteSlices
from infinilora.pool.trim import trim, trimmed
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
    kept: PackedHeader
    slices: SiteSlices
    origins: tuple[int, ...]
    runs: tuple[Piece, ...]
    """Everything that is held, neighbours as one: in order, none touches the next."""

    def pieces(self, layer: int) -> Iterator[Piece]:
        """Where a layer's sites are in the store, in the order in which they lie closed up."""
        for entry, origin in zip(self.header.manifest.sites, self.origins, strict=True):
            if entry.layer == layer:
                yield Piece(origin, entry.num_bytes)

    def trim(self, layer: int, read: Tensor, into: Tensor) -> None:
        """Lay a layer out as it is kept: uint8 [its bytes in `header`] -> uint8 [its bytes in `kept`]."""
        kept = {entry.site: entry for entry in self.kept.manifest.sites if entry.layer == layer}
        at, to, dtype = 0, 0, self.header.manifest.dtype
        for entry in self.header.manifest.sites:
            if entry.layer != layer:
                continue
            block, own = read[at : at + entry.num_bytes], kept.get(entry.site)
            at += entry.num_bytes
            if own is None:
                continue
            place = into[to : to + own.num_bytes]
            to += own.num_bytes
            cut = self.slices.get((layer, entry.site))
            if cut:
                trim(entry, own, dtype, cut, block, place)
            else:
                place.copy_(block)

    def may_read(self, offset: int) -> int:
        """How many bytes from `offset` on are held without a gap."""
        at = bisect_right(self.runs, offset, key=lambda run: run.offset) - 1
        return self.runs[at].offset + self.runs[at].num_bytes - offset


class Share:
    """One shard's part of every adapter of a base."""

    def __init__(self, name: str, held: Callable[[SiteEntry], range], slices: SiteSlices | None = None) -> None:
        """`name`: of what is read, in a cache that other shards use too. `held`: the blocks of a site that are read.

        These are experts, or the one block of a dense site. `slices`: the columns that are kept of those.
        """
        self._name = name
        self._held = held
        self._slices = slices or {}

    @classmethod
    def of_group(cls, sharding: Sharding, shard: int) -> "Share":
        """A shard of a group holds whole blocks."""

        def held(entry: SiteEntry) -> range:
            if entry.num_experts:
                return sharding.experts(shard, entry.layer, entry.num_experts)
            return range(sharding.owns(shard, entry.layer, entry.site))

        return cls(f"shard {shard} of {sharding.shape}", held)

    def key(self, digest: Digest) -> Digest:
        """What this part of an adapter is called in a cache that other shards use too."""
        return digest_of(f"{digest} {self._name}".encode())

    def cut(self, header: PackedHeader) -> Cut:
        """Raises AdapterFailed for an adapter that is narrower than the columns that are kept."""
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
        closed_up = _with_sites(header, entries)
        kept = _with_sites(header, list(self._kept(entries, header.manifest.dtype))) if self._slices else closed_up
        return Cut(closed_up, kept, self._slices, tuple(origins), tuple(_joined(origins, entries)))

    def layer_bytes(self, manifest: Manifest) -> tuple[int, ...]:
        """Bytes that are read of each layer; lm_head is the last."""
        sizes = [0] * (manifest.num_layers + 1)
        for entry in manifest.sites:
            sizes[entry.layer] += len(self._held(entry)) * (entry.num_bytes // entry.num_blocks)
        return tuple(sizes)

    def _kept(self, entries: Sequence[SiteEntry], dtype: str) -> Iterator[SiteEntry]:
        end = 0
        for entry in entries:
            kept = trimmed(entry, dtype, self._slices.get((entry.layer, entry.site), WHOLE))
            if kept is not None:
                yield msgspec.structs.replace(kept, offset=end)
                end += kept.num_bytes


def _with_sites(header: PackedHeader, entries: Sequence[SiteEntry]) -> PackedHeader:
    return replace(header, manifest=msgspec.structs.replace(header.manifest, sites=tuple(entries)))


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
