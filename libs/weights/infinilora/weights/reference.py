"""What an adapter's files meant, in a few numbers a block: kept beside the packed file, so that it can be tested later.

The files are gone once they are packed. What is left of them is what the self-test's reference road (`original`)
computed of them on fixed inputs x, seen from fixed directions u:

    answers = u^T · delta(x)  [NUM_INPUTS]     size = scale·|B|·|A·x|     colscale = u^T · (column scales - 1)

of each part of each block. A delta that is off by d is off by u^T·d here, about |d|: what a block's hash cannot see,
a reader that understands the same bytes otherwise than they were meant, is seen. Knows no store.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from infinilora.protocol.adapter import Manifest, PartEntry, Site, SiteEntry, SiteGeometry
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.weights.packed import part_arrays, part_biases, part_colscales
from infinilora.weights.tensorfile import Array

VERSION = 1
"""Of inputs and directions as they are made here. Another version's answers are not compared with."""
NUM_INPUTS = 4
"""Fixed inputs per site: with one, a delta could be small by chance, and its relative error large."""

EXACT = 2.0**-20
"""Largest self-test error allowed, of a delta's size: the rounding of float64, and of fp32 gains."""
NARROWED = 2.0**-6
"""The same where factors were rounded: twice the bound of two BF16 factors."""
_SEEN = 4.0
"""How much larger an error may be when it is seen from one direction: |u^T·d| is 0.6 |d| on average."""
_MAX_FAULTS = 20


class BlockReference(msgspec.Struct, frozen=True, array_like=True):
    """Of one part of one block."""

    answers: tuple[float, ...]
    size: float
    colscale: float = 0.0


class PartReference(msgspec.Struct, frozen=True, array_like=True):
    """Of one part of a site, block by block."""

    layer: int
    site: Site
    begin: int
    """The part's first column of the site's output."""
    width: int
    blocks: tuple[BlockReference, ...]


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept of an adapter's files. Parts without any effect are not in it."""

    version: int = VERSION
    digest: Digest
    parts: tuple[PartReference, ...]


def reference_file(packed: Path) -> Path:
    """Where ingest puts the answers of what it packs."""
    return packed.with_name(packed.name + ".reference")


def decode_reference(data: bytes) -> Reference:
    """Raises AdapterFailed for what is none, or for one of another version."""
    try:
        reference = msgspec.json.decode(data, type=Reference)
    except msgspec.DecodeError as error:
        raise AdapterFailed(f"reference answers: found {error}; wanted those of ingest") from error
    if reference.version != VERSION:
        raise AdapterFailed(f"reference answers: version: found {reference.version}; wanted {VERSION}")
    return reference


@cache
def fixed_inputs(in_dim: int) -> Array:
    """[in_dim, NUM_INPUTS] in (-1, 1), the same for ever: no library's generator promises that."""
    return _noise(f"inputs {in_dim}", in_dim * NUM_INPUTS).reshape(in_dim, NUM_INPUTS)


@cache
def _direction(width: int) -> Array:
    return _noise(f"direction {width}", width)


def _noise(name: str, count: int) -> Array:
    raw = hashlib.shake_256(f"infinilora {VERSION} {name}".encode()).digest(4 * count)
    values: Array = (np.frombuffer(raw, "<u4").astype(np.float64) + 0.5) / 2.0**31 - 1.0
    return values


# At ingest ----------------------------------------------------------------------------------------


def parts_of(site: SiteGeometry, wanted: Array, size: Array, colscales: Array) -> Iterator[PartReference]:
    """The answers of one site: deltas [blocks, out, NUM_INPUTS], squared sizes [blocks, out], column scales [out]."""
    for part in site.parts:
        columns = slice(part.out_offset, part.out_offset + part.out_dim)
        seen = np.einsum("o,bok->bk", _direction(part.out_dim), wanted[:, columns])
        sizes = np.sqrt(size[:, columns].sum(axis=1))
        colscale = float(_direction(part.out_dim) @ (colscales[columns] - 1.0))
        if sizes.any() or colscale:
            blocks = tuple(
                BlockReference(tuple(answers.tolist()), float(its), colscale)
                for answers, its in zip(seen, sizes, strict=True)
            )
            yield PartReference(site.layer, site.site, part.out_offset, part.out_dim, blocks)


# Afterwards ---------------------------------------------------------------------------------------


class Retest:
    """Holds a packed file's blocks, each given once, against the answers of the files that it was made of."""

    def __init__(self, manifest: Manifest, reference: Reference) -> None:
        self._dtype = manifest.dtype
        self._bound = _SEEN * (NARROWED if manifest.narrowed_from else EXACT)
        self._wanted = {
            (part.layer, part.site, part.begin, part.width, block): answer
            for part in reference.parts
            for block, answer in enumerate(part.blocks)
        }
        self.num_compared = 0
        self.error = 0.0
        """The largest error of any part of any block, of its delta's size there."""

    def faults(self, entry: SiteEntry, block: int, data: bytes | memoryview) -> list[str]:
        """What is wrong with one block, which is known to have the bytes that its hash says."""
        raw, x = np.frombuffer(data, np.uint8), fixed_inputs(entry.in_dim)
        found = zip(
            entry.parts,
            part_arrays(entry, self._dtype, raw),
            part_biases(entry, self._dtype, raw),
            part_colscales(entry, self._dtype, raw),
            strict=True,
        )
        said = []
        for part, (a, bt), bias, colscale in found:
            delta = part.scale * (bt.astype(np.float64).T @ (a.astype(np.float64) @ x))
            if bias is not None:
                delta += bias[:, None]
            off = self._compare(entry, part, block, delta, colscale)
            if not off <= self._bound:
                where = f"layer {entry.layer} site {entry.site.label} part {part.name} block {block}"
                said.append(f"self-test: {where}: found a delta that is off by {off:.3g}; wanted that of the files")
        return said

    def skip(self, entry: SiteEntry, block: int) -> None:
        """Leave out a block of which it is known already that it is damaged."""
        for part in entry.parts:
            self._wanted.pop((entry.layer, entry.site, part.out_offset, part.out_dim, block), None)

    def missing(self) -> list[str]:
        """What the files had and no block has; the first of them."""
        places = [key for key, answer in self._wanted.items() if answer.size or answer.colscale]
        return [
            f"self-test: layer {layer} site {site.label} columns from {begin} block {block}: found nothing; "
            f"wanted the delta of the files"
            for layer, site, begin, _, block in places[:_MAX_FAULTS]
        ]

    def _compare(self, entry: SiteEntry, part: PartEntry, block: int, delta: Array, colscale: Array | None) -> float:
        """How far a part is off, of its size; infinite where the files had nothing of the kind."""
        key = (entry.layer, entry.site, part.out_offset, part.out_dim, block)
        wanted = self._wanted.pop(key, BlockReference((0.0,) * NUM_INPUTS, 0.0))
        u = _direction(part.out_dim)
        off = _ratio(float(np.abs(u @ delta - np.array(wanted.answers)).max()), wanted.size)
        scaled = 0.0 if colscale is None else float(u @ (colscale.astype(np.float64) - 1.0))
        length = float(np.sqrt(part.out_dim if colscale is None else np.square(colscale, dtype=np.float64).sum()))
        worst = max(off, _ratio(abs(scaled - wanted.colscale), length))
        self.num_compared += 1
        self.error = max(self.error, worst)
        return worst


def _ratio(missed: float, size: float) -> float:
    """`missed / size`; infinite where nothing was wanted, and for what is no number."""
    if missed == 0.0:
        return 0.0
    ratio = missed / size if size else np.inf
    return float(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf))
