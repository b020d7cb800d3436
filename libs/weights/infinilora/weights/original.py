"""What the original files mean, read a second time: the self-test's own road from files to scale · B·(A·x).

Shares nothing with the rules, names, layouts and plans that packing goes by: it parses config and header itself,
knows the spellings of its own accord, takes ranks from shapes and multiplies in float64. It serves no one and
refuses nothing that can be told; what it cannot tell has no second opinion and is refused for that.

Layouts, with E experts and rank r (the same for a site's whole width, or for one part of it):

    dense pair        A [r, in]        B [out, r]      and, with lora_bias, b [out]: scale · (B·(A·x) + b)
      of an embedding, under names of its own; in is the vocabulary
    flattened         A [E·r, in]      B [out, r·E]     row e·r+k and column k·E+e are rank k of expert e
      until PEFT 0.19.0 with in and out crossed: A [E·r, out], B [in, r·E]
    stacked           A [E|1, r, in]   B [E|1, out, r]  one for all experts where it says 1
    MLX               A [in, r]        B [r, out]       and the scale itself in the config

DoRA, m [out] beside a dense pair: the base's output is scaled too, row by row (`original_dora`).
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infinilora.protocol.adapter import BaseCard, Site, SiteGeometry
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.original_dora import Lengths, Scaling
from infinilora.weights.original_rows import Rows, is_of_rows
from infinilora.weights.original_scale import Scales
from infinilora.weights.tensorfile import NUMPY_DTYPES, Array

PEFT_FILE, MLX_FILE = "adapter_model.safetensors", "adapters.safetensors"

_PEFT_KEY = re.compile(r"(?P<module>.+?)\.lora_(?P<half>[AB])(\.(?!weight$)[^.]+)?(\.weight)?$")
_ADDS_NOTHING = (".base_layer.weight", ".original_module.weight")
"""What copies of weights of the base end in."""
_SAID_AGAIN = re.compile(r"\.modules_to_save(\.[^.]+)?\.weight$")
"""What a table ends in that has a shorter name as well."""
_TABLE_KEY = re.compile(r"(?P<module>.+?)\.lora_embedding_(?P<half>[AB])(\.[^.]+)?$")
_BIAS_KEY = re.compile(r"(?P<module>.+?)\.lora_B(\.[^.]+)?\.(?P<half>bias)$")
_MAGNITUDE_KEY = re.compile(r"(?P<module>.+?)\.lora_magnitude_vector(\.(?!weight$)[^.]+)?(\.weight)?$")
_MLX_KEY = re.compile(r"(?P<module>.+)\.(lora_)?(?P<half>(?<=lora_)[ab]|(?<!lora_)m)$")
_TORCHS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPERS = _TORCHS | {"base_model", "module", "language_model"}
_OLD_LEAVES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Mixtral's names in earlier transformers."""


class Spot(NamedTuple):
    """Where a named projection acts: a span of a site's output, of one expert or (None) of all."""

    site: SiteGeometry
    expert: int | None
    begin: int
    end: int


class Term(NamedTuple):
    """delta[block] += scale · (b·(a·x) + bias) at a span of outputs; a [n, r, in], b [n, out, r], n = 1 for all.

    With a `scaling` that all, and the base's output, is multiplied by its factors, less the base's own bias.
    """

    spot: Spot
    scale: float
    a: Array
    b: Array
    bias: Array | None = None
    scaling: Scaling | None = None


class Original:
    """An adapter's two files, open; `terms` gives what they add, one site after the other.

    `facts`: what an engine of the base answered when this adapter was planned.
    """

    def __init__(self, directory: Path, card: BaseCard, facts: Path | None = None) -> None:
        self._config = _json("adapter_config.json", (directory / "adapter_config.json").read_bytes())
        self._is_mlx = "peft_type" not in self._config
        self._path = directory / (MLX_FILE if self._is_mlx else PEFT_FILE)
        self._data = np.asarray(np.memmap(self._path, np.uint8, "r"))
        self._data_at = 8 + int.from_bytes(self._data[:8].tobytes(), "little")
        self._header = _json(self._path.name, self._data[8 : self._data_at].tobytes())
        self._header.pop("__metadata__", None)
        self._spots = dict(_spots(card))
        self._containers = _containers(card)
        self._pairs = self._find_pairs()
        self._first = _first_values(directory, str(self._config.get("init_lora_weights")), card)
        self._lengths = Lengths(facts)
        self._rows = Rows(self._config, self._header, card, facts)
        self._scales = Scales(self._config, is_mlx=self._is_mlx)

    def places(self) -> dict[tuple[int, Site], list[str]]:
        """The modules of the file by the site they act at."""
        found: dict[tuple[int, Site], list[str]] = defaultdict(list)
        for module in self._pairs:
            site = self._flattened(module)[0] if self._container(module) else self._spot(module).site
            found[site.layer, site.site].append(module)
        return found

    def terms(self, module: str) -> list[Term]:
        """What one module's pair adds: a term, or one for each of its parts that has a scale of its own."""
        pair = self._pairs[module]
        a, b = self._tensor(pair["A"]), self._tensor(pair["B"])
        if self._container(module):
            return [self._flattened_term(module, a, b)]
        if self._is_mlx:
            a, b = a.T, b.T
        if a.ndim == 2:
            a, b = a[None], b[None]
        said, spot = _said(module), self._spot(module)
        parts = dict(_parts(said, spot))
        if not self._scales.means_parts(said, list(parts)):
            parts = {said: spot}
        return [self._term(pair, a, b, (spot, part), self._scales.of(name, a.shape[1])) for name, part in parts.items()]

    def _term(self, pair: dict[str, str], a: Array, b: Array, spots: tuple[Spot, Spot], scale: float) -> Term:
        """Of the second spot, out of a pair of the first; a [n, r, in], b [n, out, r]."""
        whole, spot = spots
        rows = slice(spot.begin - whole.begin, spot.end - whole.begin)
        if whole.expert is None and spot.expert is not None:
            a, b = (stack[spot.expert % len(stack)][None] for stack in (a, b))
        bias = self._tensor(pair["BIAS"])[rows] if "BIAS" in pair else None
        scaling = self._scaling(pair, spot, rows, scale) if "M" in pair else None
        return Term(spot, scale, a, b[:, rows], bias, scaling)

    def _scaling(self, pair: dict[str, str], spot: Spot, rows: slice, scale: float) -> Scaling:
        """Of every projection in the span, as the base's own weights make it; `rows`: the span's in the pair."""
        a, b = self._raw(pair["A"]), self._raw(pair["B"])
        if self._is_mlx:
            a, b = a.T, b.T
        modules = [
            (part.module, slice(part.out_offset - spot.begin, part.out_offset - spot.begin + part.out_dim))
            for part in spot.site.parts
            if spot.begin <= part.out_offset < spot.end
        ]
        return self._lengths.scaling(modules, self._tensor(pair["M"])[rows], (a, b[rows]), scale)

    def row_terms(self) -> dict[tuple[int, Site], Term]:
        """What replaced rows of the embedding and the head add, by place."""
        found = {}
        for rows in self._rows.terms(self._raw):
            spot = self._spot(rows.module)
            found[spot.site.layer, spot.site.site] = Term(spot, 1.0, rows.a[None], rows.b[None])
        return found

    def taken_out(self, module: str) -> list[Term]:
        """What training took out of the base before it began with this module, as terms of its own."""
        terms = [] if self._first is None else self._first.terms(module)
        return [term._replace(scale=-term.scale) for term in terms]

    # Tensors

    def _find_pairs(self) -> dict[str, dict[str, str]]:
        pairs = defaultdict[str, dict[str, str]](dict)
        for key in self._header:
            if key.endswith(_ADDS_NOTHING) or _SAID_AGAIN.search(key):
                continue
            if not self._is_mlx and is_of_rows(key):
                continue
            if self._is_mlx:
                found = _MLX_KEY.match(key)
            else:
                found = _BIAS_KEY.match(key) or _TABLE_KEY.match(key) or _PEFT_KEY.match(key)
            if magnitude := None if self._is_mlx else _MAGNITUDE_KEY.match(key):
                pairs[magnitude["module"]]["M"] = key
            elif found:
                pairs[found["module"]][found["half"].upper()] = key
            else:
                raise self._untold(key, "a key that it cannot read")
        return pairs

    def _tensor(self, key: str) -> Array:
        """float64, of the tensor's own shape."""
        entry = self._header[key]
        begin, end = (self._data_at + offset for offset in entry["data_offsets"])
        return _wide(entry["dtype"], self._data[begin:end]).reshape(entry["shape"])

    def _raw(self, key: str) -> Array:
        """As it lies in the file."""
        entry = self._header[key]
        begin, end = (self._data_at + offset for offset in entry["data_offsets"])
        return self._data[begin:end].view(NUMPY_DTYPES[entry["dtype"]]).reshape(entry["shape"])

    # Places

    def _spot(self, module: str) -> Spot:
        names = _plain(module).split(".")
        for start in range(len(names)):
            if spot := self._spots.get(".".join(names[start:])):
                return spot
        raise self._untold(module, "a module that it does not know")

    def _container(self, module: str) -> str | None:
        """The experts' container that a flattened pair belongs to, by the card's name."""
        names = _unwrapped(module).split(".")
        endings = (".".join(names[start:]) for start in range(len(names)))
        return next((ending for ending in endings if ending in self._containers), None)

    def _flattened(self, module: str) -> tuple[SiteGeometry, bool]:
        """The site whose widths the pair has, and whether in and out are crossed."""
        pair = self._pairs[module]
        widths = self._header[pair["A"]]["shape"][1], self._header[pair["B"]]["shape"][0]
        sites = self._containers[self._container(module) or ""]
        straight = [site for site in sites if widths == (site.in_dim, site.out_dim)]
        crossed = [site for site in sites if widths == (site.out_dim, site.in_dim)]
        if straight and crossed:
            version = [int(number) for number in re.findall(r"\d+", self._config["peft_version"])[:3]]
            return (crossed[0], True) if version < [0, 19, 1] else (straight[0], False)
        if not straight and not crossed:
            raise self._untold(module, f"widths {widths}")
        return (straight or crossed)[0], not straight

    def _flattened_term(self, module: str, a: Array, b: Array) -> Term:
        site, is_crossed = self._flattened(module)
        by_expert = a.reshape(site.num_experts, -1, a.shape[1])
        b_by_expert = b.reshape(b.shape[0], -1, site.num_experts).transpose(2, 0, 1)
        parameter = "gate_up_proj" if site.site is Site.MOE_GATE_UP else "down_proj"
        scale = self._scales.of(f"{_bare(_said(module))}.{parameter}", by_expert.shape[1])
        if is_crossed:
            by_expert, b_by_expert = b_by_expert.transpose(0, 2, 1), by_expert.transpose(0, 2, 1)
        return Term(Spot(site, None, 0, site.out_dim), scale, by_expert, b_by_expert)

    def _untold(self, what: str, why: str) -> AdapterInvalid:
        return AdapterInvalid(f"{self._path.name}: {what}: found {why}; wanted one that the self-test can read too")


def _first_values(directory: Path, init: str, card: BaseCard) -> "Original | None":
    """Of an adapter that began with a part of the base (PiSSA and the like): the files that it began with."""
    if init.lower().partition("_")[0] not in ("pissa", "olora", "corda", "lora"):
        return None
    places = [path.parent for path in directory.glob("*_init/adapter_config.json")]
    return Original(places[0], card) if places else None


def _json(file: str, data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data.decode("utf-8", "replace"), object_pairs_hook=_once))
    except (ValueError, RecursionError) as error:
        raise AdapterInvalid(f"{file}: JSON: found {error}; wanted what a second reader reads alike") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are there once each. Raises ValueError: of two values either may have been meant."""
    named: dict[str, Any] = {}
    for key, value in pairs:
        if key in named:
            raise ValueError(f"{key[:200]!r} twice")
        named[key] = value
    return named


def _plain(module: str) -> str:
    """A module's name without what training wrapped around its parents, and without the prefixes of the whole."""
    names = [name for name in module.split(".") if name not in _WRAPPERS]
    while names[:2] in (["model", "model"], ["model", "lm_head"]):  # the head lies beside the base's `model`
        names = names[1:]
    return ".".join(names)


def _said(module: str) -> str:
    """A module's name as a configuration has it: below the model that was trained, wherever in that it lies."""
    names = [name for name in module.split(".") if name not in _TORCHS]
    while names[0] == "module" or names[:2] == ["base_model", "model"]:
        names = names[1 if names[0] == "module" else 2 :]
    return ".".join(names)


def _bare(container: str) -> str:
    """A container's name, whichever of PEFT's nested wrappers a flattened pair was saved under."""
    return re.sub(r"(\.base_layer)+$", "", container)


def _unwrapped(module: str) -> str:
    return _plain(_bare(module))


def _spots(card: BaseCard) -> Iterator[tuple[str, Spot]]:
    """Every name of every projection: alone, joined with its neighbours, stacked over experts; old spellings too."""
    for site in card.sites:
        for part in site.parts:
            parent, _, leaf = part.module.rpartition(".")
            span = (part.out_offset, part.out_offset + part.out_dim)
            yield from _named(site, parent, leaf, span)
            if not part.out_offset and len(site.parts) > 1:
                joined = "qkv_proj" if site.site is Site.QKV else "gate_up_proj"
                yield from _named(site, parent, joined, (0, site.out_dim))


def _named(site: SiteGeometry, parent: str, leaf: str, span: tuple[int, int]) -> Iterator[tuple[str, Spot]]:
    today = {old: new for new, old in _OLD_LEAVES.items()}.get(leaf, leaf) if site.num_experts else leaf
    for where in _both(parent):
        for name in (today, _OLD_LEAVES.get(today, today)) if site.num_experts else (leaf,):
            for expert in range(site.num_experts):
                yield f"{where.replace('{expert}', str(expert))}.{name}", Spot(site, expert, *span)
            if site.num_experts:
                container = where.removesuffix(".{expert}")
                yield f"{container}.{name}", Spot(site, None, *span)
                if name != today:
                    yield f"{container.removesuffix('.experts')}.{name}", Spot(site, None, *span)
            else:
                yield f"{where}.{name}".removeprefix("."), Spot(site, 0, *span)


def _parts(module: str, spot: Spot) -> Iterator[tuple[str, Spot]]:
    """The projections that a module stands for, by the names that it would have for each alone."""
    parent = module.rpartition(".")[0]
    parts = [part for part in spot.site.parts if spot.begin <= part.out_offset < spot.end]
    is_stack = spot.site.num_experts > 0 and spot.expert is None
    if is_stack and parent.rpartition(".")[2] != "experts":
        parent += ".experts"
    for part in parts if is_stack or len(parts) > 1 else ():
        span = part.out_offset, part.out_offset + part.out_dim
        name = part.module.rpartition(".")[2]
        for expert in range(spot.site.num_experts) if is_stack else (spot.expert,):
            yield f"{parent}.{expert}.{name}" if is_stack else f"{parent}.{name}", Spot(spot.site, expert, *span)


def _containers(card: BaseCard) -> dict[str, list[SiteGeometry]]:
    found: dict[str, list[SiteGeometry]] = defaultdict(list)
    for site in card.sites:
        if site.num_experts:
            for container in _both(site.parts[0].module.partition(".{expert}")[0]):
                found[container].append(site)
    return found


def _both(name: str) -> tuple[str, str]:
    """A name of an MLP, or of what is in it, as it is today and as it was in earlier Mixtral."""
    today = name.replace(".block_sparse_moe", ".mlp")
    return today, today.replace(".mlp", ".block_sparse_moe")


def _wide(dtype: str, raw: Array) -> Array:
    """Bytes to float64, by the formats' definitions."""
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in ("F64", "F32", "F16"):
        return raw.view(f"<f{int(dtype[1:]) // 8}").astype(np.float64)
    raise AdapterInvalid(f"dtype {dtype}: found no definition of it; wanted F64, F32, BF16 or F16")
