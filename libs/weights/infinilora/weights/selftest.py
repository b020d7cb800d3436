"""Does the packed file compute what the original files say? Two roads to every delta, compared.

The reference road (`original`) goes from the original files to scale · B·(A·x) in float64, without rules, plan,
cuts or padding. The packed road reads the written file back and verifies it, as a LoRA server does. Each part of
each block (each expert) is compared by itself, so that a small one cannot hide behind a large one.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np

from infinilora.protocol.adapter import BaseCard, Site, SiteEntry, SiteGeometry
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.original import Original, Spot, Term
from infinilora.weights.original_dora import Scaling
from infinilora.weights.packed import (
    PackedHeader,
    packed_ranges,
    part_arrays,
    part_biases,
    part_colscales,
    read_header,
    verify,
)
from infinilora.weights.reference import NUM_INPUTS, fixed_inputs
from infinilora.weights.tensorfile import Array

TINY = 2.0**-100
"""Below it fp32 has fewer digits."""

MAX_DELTA = 1e18
"""Of inputs below one. A norm that comes after sums squares of it, which single precision must hold."""

MAX_THREADS = 2
"""Hashing and algebra let other threads run meanwhile; more would only hold more of the file in memory."""


class SelfTest(NamedTuple):
    """The worst of all parts of all blocks."""

    error: float
    """|found - wanted| over scale·|B|·|A·x|, which cancellation does not shrink. Infinite where zero was wanted."""
    where: str
    """The part that has it."""
    relative: float
    """The largest |found - wanted| over |wanted|: what narrowing has cost."""
    worst_relative: str
    """The part that has that."""


class _Site(NamedTuple):
    """What is compared of one site: deltas [blocks, out, inputs], squared sizes [blocks, out], column scales [out]."""

    wanted: Array
    found: Array
    size: Array
    wanted_scale: Array
    found_scale: Array


Keep = Callable[[SiteGeometry, Array, Array, Array], None]
"""Takes what the files mean at a site: deltas, squared sizes and column scales, as in `_Site`. From any thread."""


def self_test(
    directory: Path, card: BaseCard, packed: Path, facts: Path | None = None, *, keep: Keep | None = None
) -> SelfTest:
    """Compare `packed` with the files of `directory`, a few sites at a time. `facts`: what the plan was told.

    Raises AdapterFailed if a block of the packed file is not what its manifest says, AdapterInvalid if the original
    files hold what the reference road cannot read, or mean deltas that nothing can be computed with.
    """
    original, geometry = Original(directory, card, facts), card.geometry()
    modules, rows = original.places(), original.row_terms()
    with packed.open("rb") as file, ThreadPoolExecutor(MAX_THREADS) as pool:
        header = read_header(file)
        ranges = {
            (entry.layer, entry.site): (entry, offset)
            for layer in range(card.num_layers + 1)
            for entry, offset, _ in packed_ranges(header, layer)
        }

        def compare(place: tuple[int, Site]) -> SelfTest:
            site = geometry[place]
            x, compared = fixed_inputs(site.in_dim), _empty(site)
            for module in modules.get(place, ()):
                for term in (*original.terms(module), *original.taken_out(module)):
                    _add_wanted(term, x, compared)
            if place in rows:
                _add_wanted(rows[place], x, compared)
            _check_size(site, compared)
            if keep is not None:
                keep(site, compared.wanted, compared.size, compared.wanted_scale)
            if place in ranges:
                _add_found(file.fileno(), header, *ranges[place], x, compared)
            return _worst_of(site, compared)

        everywhere = sorted(modules.keys() | rows.keys() | ranges.keys())
        return reduce(_worse, pool.map(compare, everywhere), SelfTest(0.0, "", 0.0, ""))


def _empty(site: SiteGeometry) -> _Site:
    blocks = site.num_experts or 1
    shape = (blocks, site.out_dim, NUM_INPUTS)
    scales = np.ones(site.out_dim), np.ones(site.out_dim)
    return _Site(np.zeros(shape), np.zeros(shape), np.zeros(shape[:2]), *scales)


def _check_size(site: SiteGeometry, compared: _Site) -> None:
    """Raise AdapterInvalid for finite weights whose deltas are as good as infinite."""
    largest = np.abs(compared.wanted).max(axis=2)
    if not largest.max() <= MAX_DELTA:
        block, column = np.unravel_index(int(largest.argmax()), largest.shape)
        part = max((p for p in site.parts if p.out_offset <= column), key=lambda p: p.out_offset)
        raise AdapterInvalid(
            f"module {part.module.replace('{expert}', str(block))}: found weights and a scale that make a delta of "
            f"{largest.max():.3g} of inputs below 1; wanted at most {MAX_DELTA:g}, for logits overflow",
            param="source",
        )


def _add_wanted(term: Term, x: Array, to: _Site) -> None:
    spot = term.spot
    blocks = slice(None) if spot.expert is None else slice(spot.expert, spot.expert + 1)
    hidden = term.a @ x
    scaled, b = term.scale * hidden, term.b
    if term.scaling is not None:
        b = b * term.scaling.factors[:, None]
        _add_scaling(term.scaling, spot, to)
    to.wanted[blocks, spot.begin : spot.end] += b @ scaled
    norms = np.einsum("nrk,nrk->n", scaled, scaled)[:, None]
    to.size[blocks, spot.begin : spot.end] += np.einsum("nor,nor->no", b, b) * norms
    if term.bias is not None:
        to.wanted[blocks, spot.begin : spot.end] += term.scale * term.bias[:, None]
        to.size[blocks, spot.begin : spot.end] += NUM_INPUTS * (term.scale * term.bias) ** 2


def _add_scaling(scaling: Scaling, spot: Spot, to: _Site) -> None:
    """The base's columns are scaled, and what its bias lost or gained is given back: rounded as the bias itself is."""
    to.wanted_scale[spot.begin : spot.end] = scaling.factors
    to.wanted[:, spot.begin : spot.end] += ((1 - scaling.factors) * scaling.bias)[:, None]
    to.size[:, spot.begin : spot.end] += NUM_INPUTS * ((1 + np.abs(scaling.factors)) * scaling.bias) ** 2


def _add_found(file: int, header: PackedHeader, entry: SiteEntry, offset: int, x: Array, to: _Site) -> None:
    """delta[block, columns of the part] += scale · (x A^T) Bt + bias of every block, each verified as it is read."""
    block_bytes = entry.num_bytes // entry.num_blocks
    for block in range(entry.num_blocks):
        raw = os.pread(file, block_bytes, offset + block * block_bytes)
        verify(entry, block, raw)
        data, dtype = np.frombuffer(raw, np.uint8), header.manifest.dtype
        arrays, biases = part_arrays(entry, dtype, data), part_biases(entry, dtype, data)
        colscales = part_colscales(entry, dtype, data)
        for part, (a, bt), bias, colscale in zip(entry.parts, arrays, biases, colscales, strict=True):
            columns = slice(part.out_offset, part.out_offset + part.out_dim)
            hidden = a.astype(np.float64) @ x
            to.found[block, columns] += part.scale * (bt.astype(np.float64).T @ hidden)
            if bias is not None:
                to.found[block, columns] += bias[:, None]
            if colscale is not None:
                to.found_scale[columns] = colscale


def _worst_of(site: SiteGeometry, compared: _Site) -> SelfTest:
    worst = SelfTest(0.0, "", 0.0, "")
    difference = compared.found - compared.wanted
    for part in site.parts:
        columns = slice(part.out_offset, part.out_offset + part.out_dim)
        missed = _norm(difference[:, columns])
        error = _ratio(missed, np.sqrt(compared.size[:, columns].sum(axis=1)))
        relative = _ratio(missed, _norm(compared.wanted[:, columns]))
        scale_error = _scale_error(compared, columns)
        worst = _worse(worst, SelfTest(scale_error, _name(site, part.name, 0) + " column scale", 0.0, ""))
        where, there = _name(site, part.name, int(error.argmax())), _name(site, part.name, int(relative.argmax()))
        worst = _worse(worst, SelfTest(float(error.max()), where, float(relative.max()), there))
    return worst


def _scale_error(compared: _Site, columns: slice) -> float:
    """The largest |found - wanted| / |wanted| of the part's column scales."""
    wanted, found = compared.wanted_scale[columns], compared.found_scale[columns]
    return float((np.abs(found - wanted) / np.maximum(np.abs(wanted), TINY)).max())


def _worse(one: SelfTest, other: SelfTest) -> SelfTest:
    error = max(one, other, key=lambda test: test.error)
    relative = max(one, other, key=lambda test: test.relative)
    return SelfTest(error.error, error.where, relative.relative, relative.worst_relative)


def _norm(deltas: Array) -> Array:
    """The norm of each block's [outputs, inputs]."""
    norm: Array = np.sqrt(np.einsum("bok,bok->b", deltas, deltas))
    return norm


def _name(site: SiteGeometry, part: str, block: int) -> str:
    return f"layer {site.layer} site {site.site.label} part {part}" + (f" expert {block}" if site.num_experts else "")


def _ratio(missed: Array, size: Array) -> Array:
    """`missed / size`; where nothing was wanted anything at all is infinitely wrong, and so is what is no number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(missed == 0, 0.0, missed / size)
    return np.nan_to_num(ratio, nan=np.inf, posinf=np.inf)
