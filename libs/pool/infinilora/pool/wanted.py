"""What a pool knows of an adapter, from its manifest on and for as long as it waits or has a slot."""

from dataclasses import dataclass

from infinilora.pool.scales import AdapterScales
from infinilora.pool.share import Share
from infinilora.protocol.adapter import Manifest
from infinilora.weights.packed import PackedHeader


@dataclass(frozen=True, slots=True)
class Wanted:
    """`layer_bytes`: what this process holds. `layer_sites` and `scales`: as its holders are told of it."""

    manifest: Manifest
    layer_bytes: tuple[int, ...]
    layer_sites: tuple[int, ...]
    scales: AdapterScales

    @classmethod
    def of(cls, header: PackedHeader, share: Share | None, *, for_group: bool) -> "Wanted":
        """`share`: what this process holds of it, None: all. `for_group`: holders are told of what all shards hold."""
        manifest = header.manifest
        held = share.cut(header).kept.manifest if share else manifest
        told = manifest if for_group else held
        return cls(manifest, held.layer_bytes(), told.layer_sites(), AdapterScales(told, held))
