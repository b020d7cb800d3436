"""The column scales of an adapter (DoRA), for whoever adds its deltas: y = y * factors + delta.

They act on the base's output, which no kernel of a pool ever sees. So they are read out of each layer as it arrives,
and told with the lease. A copy in host memory, for as long as the adapter has its slot: it outlives no tenancy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from infinilora.protocol.adapter import VECTOR_BYTES, Manifest, Site, SiteEntry, block_spans


@dataclass(frozen=True, slots=True, eq=False)
class SiteScale:
    """What one adapter multiplies the base's columns by at one site: fp32 [out_dim], 1 where a part has none."""

    layer: int
    site: Site
    factors: Tensor


class AdapterScales:
    """Of one adapter: which sites have a column scale, and those of the layers that were read.

    A shard reads those of its own sites; the head of its group is told the others' (`put`).
    """

    def __init__(self, manifest: Manifest, held: Manifest | None = None) -> None:
        """`held`: what this process reads of it, as it lies there; None: all of it."""
        self._dtype = manifest.dtype
        self._entries: dict[int, list[tuple[int, SiteEntry]]] = {}
        self._read: dict[int, dict[Site, SiteScale]] = {}
        starts: dict[int, int] = {}
        for entry in (held or manifest).sites:
            start = starts.setdefault(entry.layer, entry.offset)
            if _has_scale(entry):
                self._entries.setdefault(entry.layer, []).append((entry.offset - start, entry))
        self.sites = _masks(manifest)
        """Bit s of entry l: site s of layer l has one; empty where none has. lm_head is the last layer."""

    def read(self, layer: int, data: Tensor) -> None:
        """Take a layer's from its packed bytes (uint8, as `Target.layers` has them)."""
        for at, entry in self._entries.get(layer, ()):
            self.put(self._scale(entry, data[at : at + entry.num_bytes]))

    def put(self, scale: SiteScale) -> None:
        """Take one that another shard has read. Before its layer is said to be ready."""
        self._read.setdefault(scale.layer, {})[scale.site] = scale

    def of(self, layer: int) -> tuple[SiteScale, ...]:
        """Those of one layer that was read."""
        return tuple(self._read.get(layer, {}).values())

    def until(self, num_layers: int) -> tuple[SiteScale, ...]:
        """Those of layers 0..num_layers-1, in order. All of these layers have been read, on every shard."""
        return tuple(scale for layer in sorted(self._read) if layer < num_layers for scale in self.of(layer))

    def _scale(self, entry: SiteEntry, block: Tensor) -> SiteScale:
        spans, _ = block_spans(entry.parts, entry.in_dim, self._dtype)
        factors = torch.ones(entry.out_dim)
        for part, span in zip(entry.parts, spans, strict=True):
            if part.has_colscale:
                values = block[span.colscale : span.colscale + part.out_dim * VECTOR_BYTES].view(torch.float32)
                factors[part.out_offset : part.out_offset + part.out_dim] = values
        return SiteScale(entry.layer, Site(entry.site), factors)


def _has_scale(entry: SiteEntry) -> bool:
    return any(part.has_colscale for part in entry.parts)


def _masks(manifest: Manifest) -> tuple[int, ...]:
    masks = [0] * (manifest.num_layers + 1)
    for entry in manifest.sites:
        masks[entry.layer] |= _has_scale(entry) << entry.site
    return tuple(masks) if any(masks) else ()
