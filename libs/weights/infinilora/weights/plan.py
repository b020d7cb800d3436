"""What will be packed: for each part of each site, which rows and columns of which tensors. No bytes are read here.

A plan is layout-free: files with one tensor per projection and files with fused experts give the same kinds
of plan, and `packed` need not know which it was.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from infinilora.protocol.adapter import AdapterWarning, PartEntry, SiteGeometry, block_spans
from infinilora.protocol.ids import Fingerprint
from infinilora.protocol.ingest import PlanRow
from infinilora.weights.peft import PeftAdapter
from infinilora.weights.tensorfile import Array, TensorFile

ALL = slice(None)


class Cut(NamedTuple):
    """A rectangle of a two-dimensional tensor of the file, or of one plane of a three-dimensional; then `turned`."""

    tensor: str
    rows: slice = ALL
    cols: slice = ALL
    turned: bool = False
    plane: int | None = None

    def read(self, file: TensorFile) -> Array:
        """The rectangle as a view in the file's dtype."""
        whole = file.read(self.tensor)
        block = (whole if self.plane is None else whole[self.plane])[self.rows, self.cols]
        return block.T if self.turned else block


class Factor(Protocol):
    """A matrix [rank, in or out] of the file, or one that was computed from a tensor of it."""

    @property
    def tensor(self) -> str: ...

    def read(self, file: TensorFile, /) -> Array: ...


@dataclass(frozen=True, slots=True)
class Pair:
    """The factors of one projection: a [rank, in], bt [rank, out]; the delta is scale · gain · btᵀ·a.

    `gain` is 1 unless experts of one part have unlike scales: the packed part has one scale, bt takes the rest.
    """

    a: Factor
    bt: Factor
    rank: int
    gain: float = 1.0
    is_computed: bool = False
    """In fp32, of the files' numbers and the base's (`replaced`)."""


class Bias(NamedTuple):
    """Some rows of a vector of the file, times a scale: what a part adds beside its delta."""

    tensor: str
    scale: float
    rows: slice = ALL

    def read(self, file: TensorFile) -> Array:
        """fp32 [out]."""
        vector: Array = file.read(self.tensor)[self.rows].astype(np.float32) * np.float32(self.scale)
        return vector


class Dora(NamedTuple):
    """What the base's columns are multiplied by, fp32 [out], and what is added then, fp32 [out] or None (`dora`)."""

    factors: Array
    bias: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class PartPlan:
    """A part of a site. One pair for each block of the site (each expert); None where nothing is adapted.

    With `dora`, its factors go into bt.
    """

    entry: PartEntry
    pairs: tuple[Pair | None, ...]
    bias: Bias | None = None
    dora: Dora | None = None


@dataclass(frozen=True, slots=True)
class SitePlan:
    """A site that is adapted, with the parts that are."""

    geometry: SiteGeometry
    parts: tuple[PartPlan, ...]


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """A checked adapter, ready to be written. Sites ascend by (layer, site)."""

    source: PeftAdapter
    base: Fingerprint
    num_layers: int
    dtype: str
    sites: tuple[SitePlan, ...]
    notes: tuple[AdapterWarning, ...] = ()
    absent: tuple[PlanRow, ...] = ()
    """Projections that the configuration targets and the files hold nothing for."""

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(note.text for note in self.notes)

    @property
    def has_gains(self) -> bool:
        """Whether experts of a part have unlike scales."""
        return any(pair and pair.gain != 1.0 for site in self.sites for part in site.parts for pair in part.pairs)

    @property
    def has_computed(self) -> bool:
        """Whether there are factors that no file holds as they are."""
        return any(pair and pair.is_computed for site in self.sites for part in site.parts for pair in part.pairs)

    @property
    def has_dora(self) -> bool:
        return any(part.dora is not None for site in self.sites for part in site.parts)

    def rows(self) -> tuple[PlanRow, ...]:
        """What is packed, part by part, then what is absent."""
        packed = (_row(site, part, self.dtype) for site in self.sites for part in site.parts)
        return (*packed, *self.absent)


def _row(site: SitePlan, part: PartPlan, dtype: str) -> PlanRow:
    geometry, entry = site.geometry, part.entry
    _, block_bytes = block_spans((entry,), geometry.in_dim, dtype)
    return PlanRow(
        site=geometry.site.label,
        module=next(p.module for p in geometry.parts if p.name == entry.name),
        layer=geometry.layer,
        rank=entry.rank,
        scale=entry.scale,
        num_bytes=block_bytes * (geometry.num_experts or 1),
        experts=sum(pair is not None for pair in part.pairs) if geometry.num_experts else 0,
        verdict="packed",
    )


def fill(part: PartPlan, block: int, file: TensorFile, a: Array, bt: Array) -> None:
    """Write a block's pair into a [part's rank, in] and bt [part's rank, out], zeros beyond the pair's rank."""
    pair = part.pairs[block]
    if pair is None:
        a[...] = 0
        bt[...] = 0
        return
    a[: pair.rank] = pair.a.read(file)
    bt[: pair.rank] = packed_bt(part, pair, file)
    a[pair.rank :] = 0
    bt[pair.rank :] = 0


def packed_bt(part: PartPlan, pair: Pair, file: TensorFile) -> Array:
    """[rank, out]: the file's, or fp32 with what goes into it."""
    factor = pair.bt.read(file)
    if pair.gain != 1.0:
        factor = factor.astype(np.float32) * np.float32(pair.gain)
    if part.dora is not None:
        factor = factor.astype(np.float32) * part.dora.factors
    return factor
