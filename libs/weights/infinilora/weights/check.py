"""Hold an adapter against a base model: every tensor has its place, its shape, its other half, finite values.

Whatever is not exactly servable is refused here, by file, tensor, found and wanted. The result is a plan.
"""

from collections import Counter, defaultdict

import ml_dtypes
import numpy as np

from infinilora.protocol.adapter import AdapterWarning, BaseCard, PartEntry, PartGeometry, Site, SiteGeometry
from infinilora.weights.absent import absent_rows, refuse_empty_layers, warning_of
from infinilora.weights.fused import container_of, establish
from infinilora.weights.joined import Joined, join_of
from infinilora.weights.keys import Halves, pairs_of
from infinilora.weights.names import ModuleIndex, Place
from infinilora.weights.peft import PeftAdapter
from infinilora.weights.plan import ALL, AdapterPlan, Bias, Pair, PartPlan, SitePlan
from infinilora.weights.refuse import invalid, listed
from infinilora.weights.rules import CONFIG_FILE, Terms
from infinilora.weights.stacked import Stacked, stack_of
from infinilora.weights.tensorfile import NUMPY_DTYPES

MAX_RANK = 512
MAX_GAIN = 1e9
"""What may be multiplied into fp32 factors for an expert whose scale is not that of the others."""
OUTER_SITES = frozenset({Site.EMBED, Site.LM_HEAD})
WHOLE_MODULES = ("lm_head", "embed_tokens")

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
    refuse_whole_modules(adapter, card)
    places = _Places(adapter, ModuleIndex(card))
    found = places.all()
    absent = absent_rows(adapter.rules, card, {key: set(blocks) for key, blocks in found.items()})
    refuse_empty_layers(adapter.tensors.name, absent, card, {layer for layer, _, _ in found})
    _check_finite(adapter)
    sites = _sites(card, found, places.biases)
    _check_ranks(adapter, sites, max_rank)
    kind, notes = _packed_dtype(adapter, sites, narrow)
    return AdapterPlan(
        source=adapter,
        base=card.fingerprint,
        num_layers=card.num_layers,
        dtype=kind,
        sites=sites,
        notes=(*warning_of(absent), *notes),
        absent=absent,
    )


# Tensors ------------------------------------------------------------------------------------------


def refuse_whole_modules(adapter: PeftAdapter, card: BaseCard) -> None:
    """Weights that replace the base's, by the config's word or by a tensor's name. Names module and both sizes."""
    file = adapter.tensors
    for key, info in file.tensors.items():
        parts = key.removesuffix(".weight").split(".")
        module = next((name for name in WHOLE_MODULES if name in parts), None)
        if not module or "base_layer" in parts or any("lora_" in part for part in parts):
            continue
        raise invalid(
            file.name,
            f"tensor {key}",
            found=f"the whole of {module}, {list(info.shape)} (modules_to_save, or a vocabulary that was resized)",
            wanted=f"LoRA halves alone; {module} of {card.name} is {[card.vocab_size, card.hidden_dim]}, "
            f"a vocabulary of {card.vocab_size}",
        )
    if saved := adapter.rules.config.modules_to_save:
        raise invalid(
            CONFIG_FILE,
            "modules_to_save",
            found=f"{saved!r:.200} (whole modules trained beside the LoRA)",
            wanted="it unset",
        )


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


# Places -------------------------------------------------------------------------------------------


class _Places:
    """Where each pair of an adapter belongs. Between calls: what was found, and the modules that nothing targets."""

    def __init__(self, adapter: PeftAdapter, index: ModuleIndex) -> None:
        self._file, self._rules, self._index = adapter.tensors, adapter.rules, index
        self._pairs = pairs_of(self._file.name, self._file.tensors, is_mlx=adapter.is_mlx)
        self._found: Found = defaultdict(dict)
        self._untargeted: list[str] = []
        self.biases: dict[PartKey, Bias] = {}
        """Of dense parts, scaled as their pairs are."""

    def all(self) -> Found:
        """Every pair in its place. Raises AdapterInvalid where one has none, or where two have the same."""
        for module, halves in self._pairs.items():
            self._place(module, halves)
        if self._untargeted:
            raise invalid(
                self._file.name,
                f"{len(self._untargeted)} modules with tensors",
                found=f"{listed(self._untargeted)}, which {CONFIG_FILE} does not target",
                wanted="only targeted modules (PEFT would silently drop these)",
            )
        return self._found

    def _place(self, module: str, halves: Halves) -> None:
        place = self._index.find(module)
        self._check_names(module, halves, place)
        if place:
            self._place_single(module, halves, place)
        elif container := container_of(module, self._index):
            self._place_flattened(container, halves)
        elif join := join_of(module, self._index):
            self._place_joined(module, halves, join)
        elif not halves.turned and (stack := stack_of(module, self._index)):
            self._place_stacked(module, halves, stack)
        else:
            raise invalid(
                self._file.name, f"tensor {halves.a}", found=f"module {module}", wanted=self._index.describe()
            )

    def _check_names(self, module: str, halves: Halves, place: Place | None) -> None:
        """An embedding's halves have names of their own; a bias is there where the configuration says so."""
        is_embedding = place is not None and place.geometry.site is Site.EMBED
        if halves.is_table != is_embedding and not halves.turned:
            names = "lora_embedding_A and lora_embedding_B" if is_embedding else "lora_A.weight and lora_B.weight"
            raise invalid(self._file.name, f"tensor {halves.a}", found=f"this for {module}", wanted=names)
        if halves.bias and not self._rules.config.lora_bias:
            raise invalid(
                self._file.name,
                f"tensor {halves.bias}",
                found="a bias on lora_B",
                wanted=f"none without lora_bias in {CONFIG_FILE} (PEFT would silently drop it)",
            )
        if self._rules.config.lora_bias and not halves.bias:
            raise invalid(
                self._file.name, f"module {module}", found="no lora_B.bias", wanted=f"one: {CONFIG_FILE} sets lora_bias"
            )

    def _place_flattened(self, container: str, halves: Halves) -> None:
        fused = establish(self._file, halves.a, halves.b, container=container, index=self._index, rules=self._rules)
        self._refuse_bias(halves)
        for number, pairs in fused.parts():
            for expert, pair in enumerate(pairs):
                self._add((fused.geometry.layer, fused.geometry.site, number), expert, pair, fused.scale)

    def _place_single(self, module: str, halves: Halves, place: Place) -> None:
        if (terms := self._terms(module)) is None:
            return
        site, part = place.geometry, place.geometry.parts[place.part]
        self._refuse_tying(module, halves, site.site)
        self._check_shapes(halves, terms.rank, site.in_dim, part.out_dim)
        pair = Pair(halves.a_cut(), halves.bt_cut(), rank=terms.rank)
        self._add((site.layer, site.site, place.part), place.expert or 0, pair, terms.scale)
        self._add_bias(halves, site, part.out_dim, {place.part: ALL}, terms.scale)

    def _place_joined(self, module: str, halves: Halves, join: Joined) -> None:
        if (terms := self._terms(module, join.names)) is None:
            return
        site = join.geometry
        self._check_shapes(halves, terms.rank, site.in_dim, site.out_dim)
        for number, pair in join.pairs(self._file, halves):
            self._add((site.layer, site.site, number), join.expert or 0, pair, terms.scale)
        rows = {n: slice(p.out_offset, p.out_offset + p.out_dim) for n, p in enumerate(site.parts)}
        self._add_bias(halves, site, site.out_dim, rows, terms.scale)

    def _place_stacked(self, module: str, halves: Halves, stack: Stacked) -> None:
        if (terms := self._terms(module, stack.names(), container=stack.container)) is None:
            return
        self._refuse_bias(halves)
        site = stack.experts.geometry
        stack.check_shapes(self._file, halves, terms.rank)
        for number, expert, pair in stack.pairs(self._file, halves):
            self._add((site.layer, site.site, number), expert, pair, terms.scale)

    def _terms(self, module: str, parts: tuple[str, ...] = (), *, container: str = "") -> Terms | None:
        """None, and kept for the refusal, where the configuration does not target the module."""
        terms = self._rules.terms(module, parts, container=container)
        if terms is None:
            self._untargeted.append(module)
        return terms

    def _refuse_tying(self, module: str, halves: Halves, site: Site) -> None:
        """One pair that was trained for embedding and head at once; here each has its own."""
        if site is Site.EMBED and halves.turned:
            raise invalid(
                self._file.name,
                f"tensor {halves.a}",
                found="LoRA of MLX on an embedding, which it adds to a tied head as well",
                wanted="LoRA on projections only",
            )
        if site in OUTER_SITES and self._rules.config.ensure_weight_tying:
            raise invalid(
                CONFIG_FILE,
                "ensure_weight_tying",
                found=f"true, with LoRA on {module}: one pair for embedding and head",
                wanted="false, and a pair for each",
            )

    def _check_shapes(self, halves: Halves, rank: int, in_dim: int, out_dim: int) -> None:
        for key, wanted in zip((halves.a, halves.b), halves.shapes(rank, in_dim, out_dim), strict=True):
            found = self._file.tensors[key].shape
            if found != wanted:
                hint = ", transposed?" if found == wanted[::-1] else ""
                raise invalid(self._file.name, f"tensor {key} shape", found=f"{list(found)}{hint}", wanted=list(wanted))

    def _add_bias(self, halves: Halves, site: SiteGeometry, out_dim: int, rows: dict[int, slice], scale: float) -> None:
        """Give each part its rows of the module's bias."""
        if halves.bias is None:
            return
        if site.num_experts:
            self._refuse_bias(halves)
        shape = self._file.tensors[halves.bias].shape
        if shape != (out_dim,):
            raise invalid(self._file.name, f"tensor {halves.bias} shape", found=list(shape), wanted=[out_dim])
        for number, part_rows in rows.items():
            self.biases[site.layer, site.site, number] = Bias(halves.bias, scale, part_rows)

    def _refuse_bias(self, halves: Halves) -> None:
        if halves.bias is not None:
            raise invalid(
                self._file.name,
                f"tensor {halves.bias}",
                found="a bias on the lora_B of experts (lora_bias), which is not served",
                wanted="lora_bias on dense projections only",
            )

    def _add(self, key: PartKey, block: int, pair: Pair, scale: float) -> None:
        blocks = self._found[key]
        if block in blocks:
            raise invalid(
                self._file.name,
                f"tensor {pair.a.tensor}",
                found=f"a second pair for one projection, beside {blocks[block][0].a.tensor}",
                wanted="one",
            )
        blocks[block] = (pair, scale)


# Parts and sites ----------------------------------------------------------------------------------


def _sites(card: BaseCard, found: Found, biases: dict[PartKey, Bias]) -> tuple[SitePlan, ...]:
    geometry, parts = card.geometry(), defaultdict[tuple[int, Site], list[PartPlan]](list)
    for layer, site, number in sorted(found):
        key = layer, site, number
        parts[layer, site].append(_part(geometry[layer, site], number, found[key], biases.get(key)))
    return tuple(SitePlan(geometry[place], tuple(adapted)) for place, adapted in parts.items())


def _part(site: SiteGeometry, number: int, blocks: dict[int, Scaled], bias: Bias | None) -> PartPlan:
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
        has_bias=bias is not None,
    )
    pairs = [_with_gain(*blocks[block], scale) if block in blocks else None for block in range(site.num_experts or 1)]
    return PartPlan(entry=entry, pairs=tuple(pairs), bias=bias)


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


def _packed_dtype(
    adapter: PeftAdapter, sites: tuple[SitePlan, ...], narrow: str | None
) -> tuple[str, tuple[AdapterWarning, ...]]:
    """The file's own dtype if it has one; fp32, which holds every other exactly, if it mixes."""
    kinds = sorted({info.dtype for info in adapter.tensors.tensors.values()})
    kind = kinds[0]
    notes: list[AdapterWarning] = []
    if len(kinds) > 1:
        kind = "F32"
        notes.append(AdapterWarning(code="widened", text=f"packed as F32: the file mixes {kinds}"))
    if any(pair and pair.gain != 1.0 for site in sites for part in site.parts for pair in part.pairs):
        kind = "F32"
        text = "packed as F32: experts of one projection have unlike scales"
        notes.append(AdapterWarning(code="widened", text=text))
    if narrow is None or narrow == kind:
        return kind, tuple(notes)
    if narrow not in NUMPY_DTYPES or NUMPY_DTYPES[narrow].itemsize >= NUMPY_DTYPES[kind].itemsize:
        raise invalid(CONFIG_FILE, "narrow", found=f"{narrow} for a file of {kind}", wanted="BF16 or F16 of F32")
    _check_range(adapter, narrow)
    notes.append(AdapterWarning(code="narrowed", text=f"narrowed {kind} -> {narrow}: {NARROWING_BOUND[narrow]}"))
    return narrow, tuple(notes)


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
