"""Hold an adapter against a base model: every tensor has its place, its shape, its other half, finite values.

Whatever is not exactly servable is refused here, by file, tensor, found and wanted. The result is a plan.
"""

from collections import Counter, defaultdict

import ml_dtypes
import numpy as np

from infinilora.protocol.adapter import BaseCard, PartEntry, PartGeometry, Site, SiteGeometry
from infinilora.weights.fused import container_of, establish
from infinilora.weights.names import Half, ModuleIndex, split_key
from infinilora.weights.peft import PeftAdapter
from infinilora.weights.plan import AdapterPlan, Cut, Pair, PartPlan, SitePlan
from infinilora.weights.refuse import invalid
from infinilora.weights.rules import CONFIG_FILE
from infinilora.weights.tensorfile import NUMPY_DTYPES

MAX_RANK = 512
OTHER: dict[Half, Half] = {"A": "B", "B": "A"}

PartKey = tuple[int, Site, int]
"""Layer, site, number of the part."""

Scaled = tuple[Pair, float]
Found = dict[PartKey, dict[int, Scaled]]
"""Pair and scale of each block (expert; 0 in a dense site) of each part."""


def plan_adapter(
    adapter: PeftAdapter, card: BaseCard, *, max_rank: int = MAX_RANK, narrow: str | None = None
) -> AdapterPlan:
    """Check everything and say what to pack. Raises AdapterInvalid.

    `narrow` packs in a smaller dtype (BF16 or F16) than the file's: an inexact choice, and part of the digest.
    """
    _check_finite(adapter)
    index = ModuleIndex(card)
    found: Found = defaultdict(dict)
    for module, halves in _pairs_of_keys(adapter).items():
        if container := container_of(module, index):
            _place_fused(adapter, index, container, halves, found)
        else:
            _place_module(adapter, index, module, halves, found)
    if not found:
        raise invalid(adapter.tensors.name, "tensors", found="none", wanted="at least one LoRA pair")
    sites = _sites(card, found)
    _check_ranks(adapter, sites, max_rank)
    kind, notes = _packed_dtype(adapter, sites, narrow)
    return AdapterPlan(
        source=adapter,
        base=card.fingerprint,
        num_layers=card.num_layers,
        dtype=kind,
        sites=sites,
        warnings=(*_missing(adapter, card, found), *notes),
    )


# Tensors ------------------------------------------------------------------------------------------


def _check_finite(adapter: PeftAdapter) -> None:
    for name in adapter.tensors.tensors:
        finite = np.isfinite(adapter.tensors.read(name))
        if not finite.all():
            raise invalid(
                adapter.tensors.name,
                f"tensor {name}",
                found=f"{finite.size - int(finite.sum())} of {finite.size} values NaN or infinite",
                wanted="finite values",
            )


def _pairs_of_keys(adapter: PeftAdapter) -> dict[str, dict[Half, str]]:
    halves: dict[str, dict[Half, str]] = defaultdict(dict)
    for key in sorted(adapter.tensors.tensors):
        module, half = split_key(adapter.tensors.name, key)
        halves[module][half] = key
    for module, keys in halves.items():
        for half, key in keys.items():
            other = OTHER[half]
            if other not in keys:
                raise invalid(
                    adapter.tensors.name,
                    f"module {module}",
                    found=f"lora_{half} alone ({key})",
                    wanted=f"lora_{other} beside it",
                )
    return dict(halves)


# Places -------------------------------------------------------------------------------------------


def _place_module(adapter: PeftAdapter, index: ModuleIndex, module: str, keys: dict[Half, str], found: Found) -> None:
    file, rules = adapter.tensors, adapter.rules
    place = index.find(module)
    if place is None:
        raise invalid(file.name, f"tensor {keys['A']}", found=f"module {module}", wanted=index.describe())
    target = rules.target_key(module)
    if target is None:
        raise invalid(
            file.name,
            f"tensor {keys['A']}",
            found=f"{module}, which {CONFIG_FILE} does not target",
            wanted="only targeted modules (PEFT would silently drop this one)",
        )
    rank, part = rules.rank(target), place.geometry.parts[place.part]
    shapes: dict[Half, tuple[int, int]] = {"A": (rank, place.geometry.in_dim), "B": (part.out_dim, rank)}
    for half, wanted in shapes.items():
        shape = file.tensors[keys[half]].shape
        if shape != wanted:
            raise invalid(file.name, f"tensor {keys[half]} shape", found=list(shape), wanted=list(wanted))
    pair = Pair(a=Cut(keys["A"]), bt=Cut(keys["B"], turned=True), rank=rank)
    key = (place.geometry.layer, place.geometry.site, place.part)
    _add(adapter, found, key, place.expert or 0, (pair, rules.scale(target)))


def _place_fused(adapter: PeftAdapter, index: ModuleIndex, container: str, keys: dict[Half, str], found: Found) -> None:
    fused = establish(adapter.tensors, keys["A"], keys["B"], container=container, index=index, rules=adapter.rules)
    for number, pairs in fused.parts():
        for expert, pair in enumerate(pairs):
            key = (fused.geometry.layer, fused.geometry.site, number)
            _add(adapter, found, key, expert, (pair, fused.scale))


def _add(adapter: PeftAdapter, found: Found, key: PartKey, block: int, scaled: Scaled) -> None:
    if block in found[key]:
        raise invalid(
            adapter.tensors.name,
            f"tensor {scaled[0].a.tensor}",
            found=f"a second pair for one projection, beside {found[key][block][0].a.tensor}",
            wanted="one",
        )
    found[key][block] = scaled


# Parts and sites ----------------------------------------------------------------------------------


def _sites(card: BaseCard, found: Found) -> tuple[SitePlan, ...]:
    geometry, parts = card.geometry(), defaultdict[tuple[int, Site], list[PartPlan]](list)
    for layer, site, number in sorted(found):
        parts[layer, site].append(_part(geometry[layer, site], number, found[layer, site, number]))
    return tuple(SitePlan(geometry[place], tuple(adapted)) for place, adapted in parts.items())


def _part(site: SiteGeometry, number: int, blocks: dict[int, Scaled]) -> PartPlan:
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
    )
    pairs = [_with_gain(*blocks[block], scale) if block in blocks else None for block in range(site.num_experts or 1)]
    return PartPlan(entry=entry, pairs=tuple(pairs))


def _with_gain(pair: Pair, scale: float, common: float) -> Pair:
    if scale == common:
        return pair
    return Pair(a=pair.a, bt=pair.bt, rank=pair.rank, gain=scale / common)


def _check_ranks(adapter: PeftAdapter, sites: tuple[SitePlan, ...], max_rank: int) -> None:
    for site in sites:
        for part in site.parts:
            if part.entry.rank > max_rank:
                tensor = next(pair.a.tensor for pair in part.pairs if pair)
                raise invalid(
                    adapter.tensors.name,
                    f"tensor {tensor} rank",
                    found=part.entry.rank,
                    wanted=f"at most {max_rank}",
                )


# The manifest's dtype and warnings ----------------------------------------------------------------


def _packed_dtype(adapter: PeftAdapter, sites: tuple[SitePlan, ...], narrow: str | None) -> tuple[str, tuple[str, ...]]:
    """The file's own dtype if it has one; fp32, which holds every other exactly, if it mixes."""
    kinds = sorted({info.dtype for info in adapter.tensors.tensors.values()})
    kind, notes = (kinds[0], ()) if len(kinds) == 1 else ("F32", (f"packed as F32: the file mixes {kinds}",))
    if any(pair and pair.gain != 1.0 for site in sites for part in site.parts for pair in part.pairs):
        kind, notes = "F32", (*notes, "packed as F32: experts of one projection have unlike scales")
    if narrow is None or narrow == kind:
        return kind, notes
    if narrow not in NUMPY_DTYPES or NUMPY_DTYPES[narrow].itemsize >= NUMPY_DTYPES[kind].itemsize:
        raise invalid(CONFIG_FILE, "narrow", found=f"{narrow} for a file of {kind}", wanted="BF16 or F16 of F32")
    _check_range(adapter, narrow)
    return narrow, (*notes, f"narrowed {kind} -> {narrow}: {NARROWING_BOUND[narrow]}")


def _check_range(adapter: PeftAdapter, narrow: str) -> None:
    limit = float(ml_dtypes.finfo(NUMPY_DTYPES[narrow]).max)
    for name in adapter.tensors.tensors:
        largest = float(np.abs(adapter.tensors.read(name).astype(np.float32)).max(initial=0.0))
        if largest > limit:
            raise invalid(
                adapter.tensors.name,
                f"tensor {name} narrowed to {narrow}",
                found=f"a value of size {largest:.6g}",
                wanted=f"at most {limit:.6g}",
            )


NARROWING_BOUND = {
    "BF16": "each factor rounded by at most 2^-9 of itself, a delta by at most 2^-7.9 of scale*|B||A|",
    "F16": "each factor rounded by at most 2^-12 of itself (2^-25 absolute below 2^-14)",
}


def _missing(adapter: PeftAdapter, card: BaseCard, found: Found) -> tuple[str, ...]:
    """Dense projections that the configuration targets and the file does not hold: they add nothing."""
    missing = [
        part.module
        for site in card.sites
        if not site.num_experts
        for number, part in enumerate(site.parts)
        if (site.layer, site.site, number) not in found and adapter.rules.target_key(part.module)
    ]
    if not missing:
        return ()
    return (f"{len(missing)} targeted modules have no tensors and add nothing, the first: {missing[0]}",)
