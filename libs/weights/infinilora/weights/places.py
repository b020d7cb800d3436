"""Where each pair of an adapter belongs in the base: its site, part and expert, with shapes, names and targets checked.

Tries the layouts one after the other: a projection, flattened experts, fused projections, stacked experts. Knows
nothing of how a plan is packed.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from typing import NamedTuple

from infinilora.protocol.adapter import Site, SiteGeometry
from infinilora.weights.absent import OUTER_SITES
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.dora import Magnitude, check_magnitude
from infinilora.weights.fused import OneGeneration, container_of, establish
from infinilora.weights.joined import Joined, join_of
from infinilora.weights.keys import Halves, pairs_of
from infinilora.weights.names import FileNames, ModuleIndex, Place, canonical
from infinilora.weights.peft import PeftAdapter
from infinilora.weights.plan import ALL, Bias, Pair
from infinilora.weights.refuse import invalid, listed
from infinilora.weights.rules import Terms
from infinilora.weights.spelling import OneSpelling
from infinilora.weights.stacked import Stacked, stack_of

PartKey = tuple[int, Site, int]
"""Layer, site, number of the part."""

Scaled = tuple[Pair, float]
Found = dict[PartKey, dict[int, Scaled]]
"""Pair and scale of each block (expert; 0 in a dense site) of each part."""


class _Rows(NamedTuple):
    """A part by its number, its rows of a module's vectors, its scale."""

    part: int
    rows: slice
    scale: float


class Places:
    """Where each pair of an adapter belongs. Between calls: what was found, and the modules that nothing targets."""

    def __init__(self, adapter: PeftAdapter, index: ModuleIndex, spelling: OneSpelling) -> None:
        """`spelling`: of what was in the file beside the pairs."""
        self._file, self._rules, self._index = adapter.tensors, adapter.rules, index
        self._pairs = pairs_of(self._file.name, self._file.tensors, is_mlx=adapter.is_mlx, spelling=spelling)
        self._found: Found = defaultdict(dict)
        self._untargeted: list[str] = []
        self._generation = OneGeneration()
        self.names = FileNames.of(self._pairs)
        self.keys: list[str] = []
        """The names by which ranks and scales of modules were asked."""
        self.biases: dict[PartKey, Bias] = {}
        """Of dense parts, scaled as their pairs are."""
        self.magnitudes: dict[PartKey, Magnitude] = {}
        """Of dense parts, with use_dora: of all that there are."""

    @property
    def modules(self) -> Set[str]:
        """All that have pairs, by their names of today."""
        return {canonical(module) for module in self._pairs}

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
        check_magnitude(self._file.name, module, halves, uses_dora=self._rules.config.use_dora)

    def _place_flattened(self, container: str, halves: Halves) -> None:
        fused = establish(self._file, halves.a, halves.b, container=container, index=self._index, rules=self._rules)
        self._generation.check(fused)
        self._refuse_vectors(halves)
        self._check_suffix(halves)
        for number, pairs in fused.parts():
            for expert, pair in enumerate(pairs):
                self._add((fused.geometry.layer, fused.geometry.site, number), expert, pair, fused.scale)

    def _place_single(self, module: str, halves: Halves, place: Place) -> None:
        for terms in self._terms(module):
            site, part = place.geometry, place.geometry.parts[place.part]
            self._refuse_tying(module, halves, site.site)
            self._check_shapes(halves, terms.rank, site.in_dim, part.out_dim)
            pair = Pair(halves.a_cut(), halves.bt_cut(), rank=terms.rank)
            self._add((site.layer, site.site, place.part), place.expert or 0, pair, terms.scale)
            self._add_vectors(halves, site, part.out_dim, [_Rows(place.part, ALL, terms.scale)])

    def _place_joined(self, module: str, halves: Halves, join: Joined) -> None:
        if not (terms := self._terms(module, join.names)):
            return
        site = join.geometry
        for rank in {term.rank for term in terms}:
            self._check_shapes(halves, rank, site.in_dim, site.out_dim)
        scales = [term.scale for term in terms]
        for number, pair in join.pairs(self._file, halves):
            self._add((site.layer, site.site, number), join.expert or 0, pair, scales[number])
        rows = [
            _Rows(number, slice(part.out_offset, part.out_offset + part.out_dim), scale)
            for number, (part, scale) in enumerate(zip(site.parts, scales, strict=True))
        ]
        self._add_vectors(halves, site, site.out_dim, rows)

    def _place_stacked(self, module: str, halves: Halves, stack: Stacked) -> None:
        names = stack.names()
        if not (terms := self._terms(module, names, container=stack.container)):
            return
        self._refuse_vectors(halves)
        site = stack.experts.geometry
        for rank in {term.rank for term in terms}:
            stack.check_shapes(self._file, halves, rank)
        scales = [term.scale for term in terms]
        for (number, expert, pair), scale in zip(stack.pairs(self._file, halves), scales, strict=True):
            self._add((site.layer, site.site, number), expert, pair, scale)

    def _terms(self, module: str, parts: Sequence[str] = (), *, container: str = "") -> list[Terms]:
        """Of each part, or of the whole; nothing, and kept for the refusal, where the configuration has no target."""
        keys = self._rules.keys(module, parts, container=container)
        if not keys:
            self._untargeted.append(module)
        self.keys += keys
        terms = [self._rules.terms(key) for key in keys]
        if len(keys) > 1:
            self._refuse_two_scales(module, keys, terms)
        return terms * len(parts) if len(terms) == 1 and parts else terms

    def _refuse_two_scales(self, module: str, parts: Sequence[str], terms: list[Terms]) -> None:
        """Of a fused module whose parts are the targets, where a pattern is of the module and of none of them."""
        key = self._rules.pattern_of(module, but_not_of=parts)
        if key is not None and any(term != self._rules.terms(module) for term in terms):
            raise invalid(
                CONFIG_FILE,
                f"pattern {key!r:.200}",
                found=f"another rank or scale for {module} than for its parts, which are the targets",
                wanted="patterns of the parts, or the module itself in target_modules",
            )

    def _refuse_tying(self, module: str, halves: Halves, site: Site) -> None:
        """One pair that was trained for embedding and head at once; here each has its own."""
        if site is Site.EMBED and halves.turned:
            raise invalid(
                self._file.name,
                f"tensor {halves.a}",
                found="LoRA of MLX on an embedding, which it adds to a tied head as well",
                wanted="LoRA on projections only",
            )
        if site in OUTER_SITES and self._rules.config.ensure_weight_tying and not self._index.has_two_tables:
            raise invalid(
                CONFIG_FILE,
                "ensure_weight_tying",
                found=f"true, with LoRA on {module}: one pair for embedding and head",
                wanted="false, and a pair for each",
            )

    def _check_suffix(self, halves: Halves) -> None:
        """Matrices end in .weight; only stacked tensors, embeddings and MLX's are named without."""
        for key in (halves.a, halves.b):
            if not (halves.turned or halves.is_table or key.endswith(".weight")):
                found = "a matrix whose name does not end in .weight, which PEFT does not load"
                raise invalid(self._file.name, f"tensor {key}", found=found, wanted=f"{key}.weight")

    def _check_shapes(self, halves: Halves, rank: int, in_dim: int, out_dim: int) -> None:
        self._check_suffix(halves)
        for key, wanted in zip((halves.a, halves.b), halves.shapes(rank, in_dim, out_dim), strict=True):
            found = self._file.tensors[key].shape
            if found != wanted:
                hint = ", transposed?" if found == wanted[::-1] else ""
                raise invalid(self._file.name, f"tensor {key} shape", found=f"{list(found)}{hint}", wanted=list(wanted))

    def _add_vectors(self, halves: Halves, site: SiteGeometry, out_dim: int, parts: list[_Rows]) -> None:
        """Give each part its rows of the module's bias and magnitude."""
        if site.num_experts:
            self._refuse_vectors(halves)
        for vector in (halves.bias, halves.magnitude):
            shape = (out_dim,) if vector is None else self._file.tensors[vector].shape
            if shape != (out_dim,):
                raise invalid(self._file.name, f"tensor {vector} shape", found=list(shape), wanted=[out_dim])
        for part, rows, scale in parts:
            key = site.layer, site.site, part
            if halves.bias is not None:
                self.biases[key] = Bias(halves.bias, scale, rows)
            if halves.magnitude is not None:
                pair = halves.a_cut(), halves.bt_cut(rows)
                self.magnitudes[key] = Magnitude(halves.magnitude, *pair, scale, rows)

    def _refuse_vectors(self, halves: Halves) -> None:
        """Of experts neither kind of vector is served."""
        if halves.bias is not None:
            raise invalid(
                self._file.name,
                f"tensor {halves.bias}",
                found="a bias on the lora_B of experts (lora_bias), which is not served",
                wanted="lora_bias on dense projections only",
            )
        if halves.magnitude is not None:
            raise invalid(
                self._file.name,
                f"tensor {halves.magnitude}",
                found="DoRA on experts, which is not served",
                wanted="DoRA on dense projections only",
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
