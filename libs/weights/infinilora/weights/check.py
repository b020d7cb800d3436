"""Hold an adapter against a base model: every tensor has its place, its shape, its other half, finite values.

Whatever is not exactly servable is refused here, by file, tensor, found and wanted. The result is a plan.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from infinilora.protocol.adapter import AdapterWarning, BaseCard, PartEntry, PartGeometry, Site, SiteGeometry
from infinilora.protocol.ingest import MAX_RANK
from infinilora.weights.absent import Expected, refuse_empty_layers, warning_of
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.copies import without_copies
from infinilora.weights.dora import dora_parts
from infinilora.weights.facts import Facts
from infinilora.weights.idle import idle_warning
from infinilora.weights.names import ModuleIndex
from infinilora.weights.peft import PeftAdapter
from infinilora.weights.pissa import check_head
from infinilora.weights.places import Found, PartKey, Places, Scaled
from infinilora.weights.plan import AdapterPlan, Bias, Dora, Pair, PartPlan, SitePlan, packed_bt
from infinilora.weights.refuse import invalid
from infinilora.weights.replaced import Replaced
from infinilora.weights.spelling import OneSpelling
from infinilora.weights.tensorfile import NUMPY_DTYPES, Array, TensorFile, all_finite

MAX_GAIN = 1e9
"""What may be multiplied into fp32 factors for an expert whose scale is not that of the others."""

MAX_LOST = 2.0**-8
"""What narrowing may change of a row of a factor: twice BF16's rounding. More is lost of F16's numbers below 2^-14."""


def plan_adapter(
    adapter: PeftAdapter,
    card: BaseCard,
    *,
    max_rank: int = MAX_RANK,
    narrow: str | None = None,
    facts: Facts | None = None,
) -> AdapterPlan:
    """Check everything and say what to pack. Raises AdapterInvalid, or FactsWanted.

    `narrow` packs in a smaller dtype (BF16 or F16) than the file's: an inexact choice, and part of the digest.
    """
    facts = facts or Facts(card)
    spelling = OneSpelling(adapter.tensors.name)
    adapter = replace(adapter, tensors=without_copies(adapter.tensors, card, spelling))
    replaced = Replaced.of(adapter, card, spelling, max_rank=max_rank)
    adapter = replace(adapter, tensors=replaced.rest())
    places = Places(adapter, ModuleIndex(card), spelling)
    found = places.all()
    check_head(adapter.tensors, card, places.modules)
    present = {key: set(blocks) for key, blocks in found.items()} | {key: {0} for key in replaced.places()}
    absent = Expected(adapter.rules, places.names).absent(card, present)
    refuse_empty_layers(adapter.tensors.name, absent, found)
    _check_finite(replaced.file)
    _check_ranks(adapter, found, max_rank)  # nobody is asked about what is refused anyway
    rows = replaced.pairs(facts, found)
    doras = dora_parts(adapter.tensors, card, places.magnitudes, facts)
    facts.check_answered()
    found |= {key: {0: (pair, 1.0)} for key, pair in rows.items()}
    if not found:
        raise invalid(
            replaced.file.name, "tensors", found=f"nothing that {card.name} has not", wanted="a LoRA pair, or rows"
        )
    sites = _sites(card, found, places.biases, doras)
    kind, notes = _packed_dtype(adapter, sites, narrow)
    return AdapterPlan(
        source=adapter,
        base=card.fingerprint,
        num_layers=card.num_layers,
        dtype=kind,
        sites=sites,
        notes=(*adapter.rules.doubts(places.keys), *warning_of(absent), *idle_warning(adapter.tensors, sites), *notes),
        absent=absent,
    )


# Tensors ------------------------------------------------------------------------------------------


def _check_finite(file: TensorFile) -> None:
    for name in file.tensors:
        values = file.read(name)
        if not all_finite(values):
            finite = np.isfinite(values)
            raise invalid(
                file.name,
                f"tensor {name}",
                found=f"{finite.size - int(finite.sum())} of {finite.size} values NaN or infinite",
                wanted="finite values",
            )


# Parts and sites ----------------------------------------------------------------------------------


def _sites(
    card: BaseCard, found: Found, biases: dict[PartKey, Bias], doras: dict[PartKey, Dora]
) -> tuple[SitePlan, ...]:
    geometry, parts = card.geometry(), defaultdict[tuple[int, Site], list[PartPlan]](list)
    for layer, site, number in sorted(found):
        key = layer, site, number
        vectors = biases.get(key), doras.get(key)
        parts[layer, site].append(_part(geometry[layer, site], number, found[key], *vectors))
    return tuple(SitePlan(geometry[place], tuple(adapted)) for place, adapted in parts.items())


def _part(site: SiteGeometry, number: int, blocks: dict[int, Scaled], bias: Bias | None, dora: Dora | None) -> PartPlan:
    """One rank and one scale for all experts: lower ranks are padded with zeros, unlike scales go into Bt."""
    geometry: PartGeometry = site.parts[number]
    scale, _ = Counter(scale for _, scale in blocks.values()).most_common(1)[0]
    if scale == 0.0:
        scale = next((s for _, s in blocks.values() if s), 0.0)
    entry = PartEntry(
        name=geometry.name,
        rank=max(pair.rank for pair, _ in blocks.values()),
        scale=scale,
        out_dim=geometry.out_dim,
        out_offset=geometry.out_offset,
        has_bias=bias is not None or (dora is not None and dora.bias is not None),
        has_colscale=dora is not None,
    )
    pairs = [_with_gain(*blocks[block], scale) if block in blocks else None for block in range(site.num_experts or 1)]
    return PartPlan(entry=entry, pairs=tuple(pairs), bias=bias, dora=dora)


def _with_gain(pair: Pair, scale: float, common: float) -> Pair:
    if scale == common:
        return pair
    gain = scale / common
    if scale and not 1 / MAX_GAIN <= abs(gain) <= MAX_GAIN:
        raise invalid(
            CONFIG_FILE,
            f"scale of {pair.a.tensor}",
            found=f"{scale:.6g} beside {common:.6g} for other experts of the same projection",
            wanted=f"scales that differ by a factor of at most {MAX_GAIN:g}",
        )
    return Pair(a=pair.a, bt=pair.bt, rank=pair.rank, gain=gain)


def _check_ranks(adapter: PeftAdapter, found: Found, max_rank: int) -> None:
    for _, blocks in sorted(found.items()):
        for pair, _ in blocks.values():
            if pair.rank > max_rank:
                raise invalid(
                    adapter.tensors.name,
                    f"tensor {pair.a.tensor} rank",
                    found=pair.rank,
                    wanted=f"at most {max_rank} (INFINILORA_MAX_RANK)",
                )


# The manifest's dtype and warnings ----------------------------------------------------------------


def _packed_dtype(
    adapter: PeftAdapter, sites: tuple[SitePlan, ...], narrow: str | None
) -> tuple[str, tuple[AdapterWarning, ...]]:
    """The file's own dtype if it has one; fp32, which holds every other exactly, if it mixes."""
    kinds = sorted({info.dtype for info in adapter.tensors.tensors.values()})
    kind = kinds[0] if kinds else "F32"
    notes: list[AdapterWarning] = []
    if len(kinds) > 1:
        kind = "F32"
        notes.append(AdapterWarning(code="widened", text=f"packed as F32: the file mixes {kinds}"))
    if any(pair and pair.gain != 1.0 for site in sites for part in site.parts for pair in part.pairs):
        kind = "F32"
        text = "packed as F32: experts of one projection have unlike scales"
        notes.append(AdapterWarning(code="widened", text=text))
    if kind != "F32" and any(part.dora is not None for site in sites for part in site.parts):
        kind = "F32"
        notes.append(AdapterWarning(code="widened", text="packed as F32: DoRA's factors are multiplied into B"))
    if kind != "F32" and any(True for _ in _computed(sites)):
        kind = "F32"
        notes.append(
            AdapterWarning(code="widened", text="packed as F32: replaced rows are differences from the base's")
        )
    if narrow is None or narrow == kind:
        return kind, tuple(notes)
    if narrow not in NUMPY_DTYPES or NUMPY_DTYPES[narrow].itemsize >= NUMPY_DTYPES[kind].itemsize:
        raise invalid(CONFIG_FILE, "narrow", found=f"{narrow} for a file of {kind}", wanted="BF16 or F16 of F32")
    _check_range(adapter.tensors, sites, narrow)
    notes.append(AdapterWarning(code="narrowed", text=f"narrowed {kind} -> {narrow}: {NARROWING_BOUND[narrow]}"))
    return narrow, tuple(notes)


def _computed(sites: tuple[SitePlan, ...]) -> Iterator[Pair]:
    return (pair for site in sites for part in site.parts for pair in part.pairs if pair and pair.is_computed)


def _check_range(file: TensorFile, sites: tuple[SitePlan, ...], narrow: str) -> None:
    """Of A and Bt as they are packed. Biases and DoRA's magnitudes are no part of them: vectors stay fp32."""
    limit = float(ml_dtypes.finfo(NUMPY_DTYPES[narrow]).max)
    for name, values in _factors(file, sites):
        what = f"tensor {name} narrowed to {narrow}"
        largest = float(np.abs(values.astype(np.float32)).max(initial=0.0))
        if largest > limit:
            raise invalid(file.name, what, found=f"a value of size {largest:.6g}", wanted=f"at most {limit:.6g}")
        lost = _lost(values.astype(np.float64), NUMPY_DTYPES[narrow])
        if lost > MAX_LOST:
            raise invalid(
                file.name,
                what,
                found=f"values so small that rounding changes a rank by {lost:.3g} of its size",
                wanted=f"at most {MAX_LOST:.3g}; register it without narrowing",
            )


def _lost(factor: Array, kind: np.dtype[Any]) -> float:
    """How much of a rank's row [rank, n] rounding changes at most: |row - rounded| / |row|."""
    with np.errstate(under="ignore"):
        rounded = factor.astype(kind).astype(np.float64)
    sizes = np.linalg.norm(factor, axis=1)
    ratios = np.linalg.norm(factor - rounded, axis=1) / np.maximum(sizes, np.finfo(np.float64).tiny)
    return float(ratios.max(initial=0.0))


def _factors(file: TensorFile, sites: tuple[SitePlan, ...]) -> Iterator[tuple[str, Array]]:
    for part in (part for site in sites for part in site.parts):
        for pair in filter(None, part.pairs):
            yield pair.a.tensor, pair.a.read(file)
            yield pair.bt.tensor, packed_bt(part, pair, file)


NARROWING_BOUND = {
    "BF16": "each factor rounded by at most 2^-9 of itself, a delta by at most 2^-7.9 of scale*|B||A|",
    "F16": "each factor rounded by at most 2^-12 of itself (2^-25 absolute below 2^-14)",
}
