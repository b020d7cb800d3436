"""What DoRA multiplies the base's output by, y = y * factors + delta: with a lease, once, and before the delta.

A scale belongs to one tenancy of a slot: it comes with the lease, is read by the step thread for as long as rows run
under that lease, and goes with it. A layer does not count as ready before its scales are here.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinilora.pool.scales import SiteScale
from infinilora.pool.slices import WHOLE, SiteSlice
from infinilora.protocol.adapter import VECTOR_BYTES, Site, SiteGeometry
from infinilora.protocol.errors import Internal
from infinilora.runtime.rpc import Message

_SITES = frozenset(Site)


class ColumnScales:
    """The scales of one tenancy, filled as its layers arrive. Equal only to itself: another tenancy has its own.

    One thread puts; a layer's scales are read only after it was said to be ready, so that nothing is locked.
    """

    def __init__(self, sites: Sequence[int]) -> None:
        """`sites`: bit s of entry l says that site s of layer l has one."""
        self._sites = tuple(sites)
        self._missing = list(sites)
        self._factors: dict[tuple[int, Site], Tensor] = {}

    def put(self, scale: SiteScale) -> None:
        """Keep a scale. Raises Internal where this tenancy has none."""
        layer, site = scale.layer, scale.site
        if not self.has(layer, site):
            raise Internal(f"a column scale came for site {site.label} of layer {layer}, where the lease names none")
        self._factors[layer, site] = scale.factors
        self._missing[layer] &= ~(1 << site)

    def has(self, layer: int, site: Site) -> bool:
        return layer < len(self._sites) and bool(self._sites[layer] >> site & 1)

    @property
    def layers_known(self) -> int:
        """Leading layers of which no scale is missing."""
        return next((layer for layer, missing in enumerate(self._missing) if missing), len(self._missing))

    def on(self, layer: int, site: Site, device: torch.device) -> Tensor | None:
        """The factors on a device, brought there once; None where they are not here yet."""
        factors = self._factors.get((layer, site))
        if factors is not None and factors.device != device:
            factors = self._factors[layer, site] = factors.to(device)
        return factors


class ScaledRows(NamedTuple):
    """Rows of a step whose adapter scales a site."""

    rows: slice
    scales: ColumnScales


def scale_rows(scaled: Iterable[ScaledRows], layer: int, site: Site, y: Tensor, cut: SiteSlice = WHOLE) -> None:
    """y[rows] *= factors, in place, each row once. y is [T, out]. Raises Internal where factors do not fit y.

    On a shard that has some of the columns y is those. A partial product is multiplied like a whole one: it is a sum.
    """
    for rows, scales in scaled:
        found = scales.on(layer, site, y.device)
        factors = None if found is None else cut.of(found)
        if factors is None or factors.shape != y.shape[1:]:
            shape, wanted = "none" if factors is None else list(factors.shape), list(y.shape[1:])
            raise Internal(f"column scale of site {site.label} of layer {layer}: found {shape}; wanted {wanted}")
        y[rows].mul_(factors)


def column_scales(layer_sites: Sequence[int], scaled_sites: Sequence[int]) -> ColumnScales | None:
    """What a lease begins with: None where it scales nothing. Raises Internal for a scale where nothing is adapted."""
    if not scaled_sites:
        return None
    if len(scaled_sites) != len(layer_sites) or any(s & ~a for a, s in zip(layer_sites, scaled_sites, strict=True)):
        raise Internal(f"scaled_sites: found {list(scaled_sites)}; wanted sites of layer_sites {list(layer_sites)}")
    return ColumnScales(scaled_sites)


def read_scale(news: Message, geometry: Mapping[tuple[int, Site], SiteGeometry]) -> SiteScale:
    """A ColumnScale as it came, held against the base. Raises Internal where it does not fit."""
    known = geometry.get((news.layer, Site(news.site))) if news.site in _SITES else None
    if known is None or len(news.factors) != known.out_dim * VECTOR_BYTES:
        wanted = "a site of this base" if known is None else f"{known.out_dim} of fp32"
        where = f"column scale of site {news.site} of layer {news.layer}"
        raise Internal(f"{where}: found {len(news.factors)} bytes; wanted {wanted}")
    values = np.frombuffer(news.factors, "<f4").astype(np.float32)
    return SiteScale(news.layer, known.site, torch.from_numpy(values))
