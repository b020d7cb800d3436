"""LoRA on projections that the trainer had fused and the base model has apart: one A, and a B of all their rows.

    qkv_proj        A [r, h]   B [q + k + v, r]       rows of q, then k, then v
    gate_up_proj    A [r, h]   B [gate + up, r]       rows of gate, then up; dense, shared or of one expert

Each part has the whole A and its own rows of B. Where separate adapters were joined, B is block-diagonal: of a
part only the span of ranks is kept that its rows use.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from infinilora.protocol.adapter import SiteGeometry
from infinilora.weights.keys import Halves
from infinilora.weights.names import JOINS, ModuleIndex
from infinilora.weights.plan import Pair
from infinilora.weights.tensorfile import Array, TensorFile


@dataclass(frozen=True, slots=True)
class Joined:
    """A fused module that this base has apart: the site that its parts make up, and their names."""

    geometry: SiteGeometry
    expert: int | None
    names: tuple[str, ...]

    def pairs(self, file: TensorFile, halves: Halves) -> Iterator[tuple[int, Pair]]:
        """(part, pair) for each; the tensors have the shapes of the whole module."""
        for number, part in enumerate(self.geometry.parts):
            out = slice(part.out_offset, part.out_offset + part.out_dim)
            ranks = used_ranks(halves.bt_cut(out).read(file))
            yield number, Pair(halves.a_cut(ranks), halves.bt_cut(out, ranks), rank=ranks.stop - ranks.start)


def join_of(module: str, index: ModuleIndex) -> Joined | None:
    """What a fused module's name means here; None unless this base has all its parts, at one site, and no others."""
    container, _, leaf = module.rpartition(".")
    names = tuple(f"{container}.{part}" for part in JOINS.get(leaf, ()))
    places = [place for place in map(index.find, names) if place]
    if not places or len(places) < len(names):
        return None
    site = places[0].geometry
    if [(place.geometry, place.part) for place in places] != [(site, number) for number in range(len(site.parts))]:
        return None
    return Joined(site, places[0].expert, names)


def used_ranks(factor: Array) -> slice:
    """Of Bt [..., rank, out]: from the first rank that is not all zeros to the last; one rank where there is none."""
    used = (factor != 0).any(axis=-1).reshape(-1, factor.shape[-2]).any(axis=0)
    places = np.flatnonzero(used)
    return slice(int(places[0]), int(places[-1]) + 1) if places.size else slice(0, 1)
