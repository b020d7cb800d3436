"""Random adapters as trainers write them: a config, its tensors, and a base they fit; and single faults in them.

Everything is drawn by hypothesis, so that a failure shrinks to a small file. Says nothing of what a file means: that
is `explicit_merge`, whose rules are used only to put tensors where the config adapts something.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save
from typing_extensions import override

from infinilora.protocol.adapter import BaseCard
from support.cards import make_card
from support.explicit_merge import (
    CONFIG_NAME,
    MLX_TENSORS_NAME,
    STACKED,
    TENSORS_NAME,
    projections,
    rank_of,
    targets_module,
    targets_parameter,
)

Array = NDArray[Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]
Layout = Literal["plain", "joined", "flat", "flat_crossed", "stacked", "shared_outer", "mlx"]
"""How experts (and, for `joined`, fused projections) lie in the file."""

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "llama": ("plain", "plain", "plain", "joined", "mlx"),
    "qwen3_moe": ("plain", "plain", "flat", "flat_crossed", "joined", "stacked", "shared_outer"),
    "qwen2_moe": ("plain", "plain", "flat", "flat_crossed", "joined", "stacked", "shared_outer"),
    "mixtral": ("plain", "plain", "flat", "flat_crossed", "stacked", "shared_outer"),
}
_TINY: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}
_SQUARE_ATTENTION: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8}
_BASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {**_TINY, "intermediate": 24}),
    ("llama", {**_SQUARE_ATTENTION, "intermediate": 16, "num_layers": 1}),
    ("llama", {"hidden": 8, "heads": 1, "kv_heads": 1, "head_dim": 4, "intermediate": 12, "num_layers": 11}),
    ("llama", {**_TINY, "intermediate": 24, "vocab_size": 40, "outer": True}),
    ("qwen3_moe", {**_TINY, "intermediate": 12, "num_experts": 4}),
    ("qwen3_moe", {**_TINY, "intermediate": 8, "num_experts": 3}),  # gate_up is square
    ("qwen3_moe", {**_SQUARE_ATTENTION, "intermediate": 16, "num_experts": 2}),  # down is square
    ("qwen3_moe", {**_TINY, "intermediate": 4, "num_experts": 12, "num_layers": 1}),
    ("qwen2_moe", {**_TINY, "intermediate": 12, "num_experts": 4, "shared_intermediate": 20}),
    ("qwen2_moe", {**_TINY, "intermediate": 8, "num_experts": 3, "shared_intermediate": 8, "num_layers": 3}),
    ("mixtral", {**_TINY, "intermediate": 12, "num_experts": 4}),
    ("mixtral", {**_TINY, "intermediate": 16, "num_experts": 3}),  # down is square
)
BASES = range(len(_BASES))
KINDS = tuple(kind for kind, _ in _BASES)
OUTSIDE = -1
EMBEDDING = "embed_tokens"
PREFIX = "base_model.model."
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_DTYPES: tuple[Any, ...] = (np.float32, np.float16, ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Adapter:
    """The two files of an adapter and the base they are for. `raw` overrides what `tensors` would be written as."""

    base: int
    config: dict[str, Any]
    tensors: dict[str, Array]
    must_serve: bool
    """False: a server may also refuse, if it says so: a pair can be read in two ways, or an expert has a bias."""
    has_meaning: bool = True
    """False: nothing in the files tells how they are to be read."""
    notes: tuple[str, ...] = field(default=())
    raw: bytes | None = None
    file_name: str = TENSORS_NAME

    @property
    def card(self) -> BaseCard:
        return card(self.base)

    @override
    def __repr__(self) -> str:
        shapes = {name: f"{t.dtype}{list(t.shape)}" for name, t in self.tensors.items()}
        return f"Adapter(base={self.base}, notes={self.notes}, config={self.config}, tensors={shapes})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(repr(self))  # what hypothesis prints of a failure

    def write(self, directory: Path) -> Path:
        (directory / CONFIG_NAME).write_text(json.dumps(self.config))
        (directory / self.file_name).write_bytes(self.raw if self.raw is not None else file_bytes(self.tensors))
        return directory


@cache
def card(base: int) -> BaseCard:
    kind, sizes = _BASES[base]
    return make_card(kind, **sizes)


def file_bytes(tensors: dict[str, Array]) -> bytes:
    """A safetensors file, by the library that defines the format."""
    data: bytes = save(tensors, {"format": "pt"})
    return data


# What a trainer's model could have wrapped ----------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """One pair that a file may hold: where its tensors are called, and what rules of the config see of it."""

    name: str
    """Module, as trainers call it; for stacked experts their own module or parameter."""
    rule_name: str
    """The name that targets and patterns are matched against: the parameter's, where one is wrapped."""
    layer: int
    """OUTSIDE: the embedding and lm_head."""
    in_dim: int
    out_dim: int
    num_experts: int = 0
    """Above 0: a stacked parameter [experts, out, in]."""
    is_parameter: bool = False
    """Wrapped by `target_parameters`, not by `target_modules`."""
    half_shared: bool = False


def units(base: int, layout: Layout) -> list[Unit]:
    """Every pair that a file of this layout could hold for this base."""
    singles = list(_singles(base, layout))
    dense = [unit for unit in singles if ".experts." not in unit.name]
    match layout:
        case "plain" | "mlx":
            return singles
        case "joined":
            return list(_joined(singles))
        case "flat" | "flat_crossed":
            return [*dense, *_expert_parameters(base, by_part=False)]
        case _:
            stacks = _expert_parameters(base, by_part=KINDS[base] == "mixtral")
            return [*dense, *(replace(unit, half_shared=layout == "shared_outer") for unit in stacks)]


def _singles(base: int, layout: Layout) -> Iterator[Unit]:
    """Every matrix of the base by itself. Where experts are one parameter, the router is a parameter too."""
    is_flat = layout in ("flat", "flat_crossed")
    for module, one in projections(card(base)).items():
        name = module if is_flat else _trainers_name(base, module)
        if is_flat and one.site == "router":
            yield Unit(name, f"{name}.weight", one.layer, one.in_dim, one.out_dim, is_parameter=True)
        else:
            layer = one.layer if ".layers." in name else OUTSIDE
            yield Unit(name, name, layer, one.in_dim, one.out_dim)


def _trainers_name(base: int, module: str) -> str:
    if KINDS[base] != "mixtral" or ".mlp." not in module:
        return module
    parent, _, leaf = module.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
    return f"{parent}.{_MIXTRAL.get(leaf, leaf)}"


def _joined(single: Sequence[Unit]) -> Iterator[Unit]:
    """qkv_proj and gate_up_proj in place of their parts, as some model code has them."""
    by_name = {unit.name: unit for unit in single}
    for unit in single:
        parent, _, leaf = unit.name.rpartition(".")
        match leaf:
            case "q_proj" | "gate_proj":
                joined, parts = ("qkv_proj", "qkv") if leaf == "q_proj" else ("gate_up_proj", ("gate", "up"))
                out_dim = sum(by_name[f"{parent}.{part}_proj"].out_dim for part in parts)
                yield replace(unit, name=f"{parent}.{joined}", rule_name=f"{parent}.{joined}", out_dim=out_dim)
            case "k_proj" | "v_proj" | "up_proj":
                continue
            case _:
                yield unit


def _expert_parameters(base: int, *, by_part: bool) -> Iterator[Unit]:
    """The experts of each layer as stacked parameters: gate_up_proj and down_proj, or Mixtral's w1, w3, w2."""
    for site in card(base).sites:
        if not site.num_experts:
            continue
        experts = site.parts[0].module.partition(".{expert}")[0]
        whole = "down_proj" if site.parts[0].name == "down" else "gate_up_proj"
        if by_part:
            holder = experts.replace(".mlp.experts", ".block_sparse_moe")
            for part in site.parts:
                name = f"{holder}.{_MIXTRAL[f'{part.name}_proj']}"
                yield Unit(name, name, site.layer, site.in_dim, part.out_dim, site.num_experts, is_parameter=True)
            continue
        name = f"{experts}.{whole}"
        yield Unit(name, name, site.layer, site.in_dim, site.out_dim, site.num_experts, is_parameter=True)


# Configs ----------------------------------------------------------------------------------------------

_NO_MATTER: dict[str, tuple[Any, ...]] = {
    "task_type": ("CAUSAL_LM", None),
    "inference_mode": (True, False),
    "bias": ("none",),
    "base_model_name_or_path": (None, "/home/user/models/x", "org/gated-model", "org/model-bnb-4bit"),
    "modules_to_save": (None, []),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "eva_config": (None, {"rho": 2.0, "tau": 0.99}),
    "loftq_config": ({}, None),
    "corda_config": (None,),
    "layer_replication": (None,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "qalora_group_size": (16,),
    "megatron_config": (None,),
    "megatron_core": ("megatron.core",),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
    "auto_mapping": (None,),
    "revision": (None, "main"),
    "arrow_config": (None,),
    "ensure_weight_tying": (False,),
    "future_flag": (False,),
    "future_dict": ({},),
    "future_list": ([],),
}
_OLD_VERSIONS = ("0.17.0", "0.17.1", "0.18.0", "0.18.1")
_NEW_VERSIONS = ("0.19.1", "0.20.0", "0.21.2")


def _dress(draw: Draw, config: dict[str, Any], *, has_parameters: bool) -> dict[str, Any]:
    """Keys that change nothing, and the order of keys as the trainer liked it."""
    for key in draw(st.lists(st.sampled_from(sorted(_NO_MATTER)), max_size=8, unique=True)):
        config[key] = draw(st.sampled_from(_NO_MATTER[key]))
    if not has_parameters:  # PEFT takes neither of these with parameters
        if draw(st.booleans()):
            config["lora_dropout"] = draw(st.sampled_from((0.0, 0.05)))
        if draw(st.integers(0, 5)) == 0:
            config["fan_in_fan_out"] = draw(st.booleans())
    return config


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _tail(name: str, depth: int) -> str:
    return ".".join(name.split(".")[-depth:])


def _targets(draw: Draw, chosen: Sequence[Unit]) -> Any:
    """`target_modules` that cover at least the chosen units; None and "all-linear" among them."""
    names = [unit.rule_name for unit in chosen]
    leaves = sorted({_leaf(name) for name in names})
    is_outside = any(unit.layer == OUTSIDE for unit in chosen)  # all-linear is of the layers alone
    linear = "full" if is_outside else "all-linear"
    match draw(st.sampled_from(("suffix", "suffix", "dotted", "regex", linear, "absent", "full"))):
        case "suffix":
            return draw(st.permutations(leaves))
        case "dotted":
            depth = draw(st.integers(2, 4))
            return sorted({_tail(name, depth) for name in names})
        case "regex":
            either = "|".join(leaves)
            forms = (rf".*\.({either})", rf"model\.layers\.\d+\..*({either})$", rf"(?:.*?)[.](?:{either})")
            return rf"(.*\.)?({either})" if is_outside else draw(st.sampled_from(forms))
        case "all-linear":
            return draw(st.sampled_from(("all-linear", "all-linear", "All-Linear")))
        case "full":
            return sorted(names)
        case _:
            return None


def _patterns(draw: Draw, names: Sequence[str], values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Up to four patterns over the names, several of which may match one name; their order is the file's."""
    patterns: dict[str, Any] = {}
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(names))
        leaf, layer = _leaf(name), re.search(r"layers\.\d+", name)
        within = layer[0] if layer else "layers.0"
        forms = (
            leaf,
            name,
            _tail(name, 2),
            _tail(name, 3),
            f"{within}.*",
            rf".*\.{re.escape(leaf)}",
            rf"{re.escape(within)}\..*{leaf}",
            rf"[a-z]*{leaf[1:]}",
            rf"({leaf}|o_proj)",
            rf"^{re.escape(name)}",
            rf"layers\.\d+\..*\.{leaf}",
            leaf[1:],
            f"{name}.nothing",
            r"layers\.[1-9]\d*\..*",
        )
        patterns[draw(st.sampled_from(forms))] = draw(values)
    return patterns


_RANKS = st.one_of(st.integers(1, 8), st.integers(1, 64), st.sampled_from((1, 8, 16, 32, 64)))
_ALPHAS = st.one_of(st.integers(1, 128), st.sampled_from((0.5, 1.0, 2.5, 16, 32.0, 1e-3, 4096)))


@st.composite
def adapters(draw: Draw, *, kinds: Sequence[str] = tuple(LAYOUTS), layouts: Sequence[Layout] | None = None) -> Adapter:
    """An adapter that some trainer could have written, for one of the bases."""
    base = draw(st.sampled_from([b for b in BASES if KINDS[b] in kinds]))
    layout = draw(st.sampled_from(LAYOUTS[KINDS[base]] if layouts is None else list(layouts)))
    everything = units(base, layout)
    leaves = sorted({_leaf(unit.name) for unit in everything})
    wanted = draw(st.sets(st.sampled_from(leaves), min_size=1))
    chosen = [unit for unit in everything if _leaf(unit.name) in wanted]
    if layout == "mlx" and any(unit.layer != OUTSIDE for unit in chosen):
        return _mlx_adapter(draw, base, chosen)
    config = _config(draw, layout, chosen, everything)
    held = _held(draw, config, everything)
    if any(unit.name.endswith(EMBEDDING) for unit in held):
        config["lora_bias"] = False  # PEFT has none for embeddings
    is_plain, has_meaning = _can_be_read(config, layout, held)
    is_biased_expert = config.get("lora_bias") and any(".experts." in unit.name for unit in held)
    return Adapter(
        base,
        config,
        _tensors(draw, config, layout, held),
        must_serve=is_plain and not is_biased_expert,
        has_meaning=has_meaning,
        notes=(KINDS[base], layout),
    )


def _config(draw: Draw, layout: Layout, chosen: Sequence[Unit], everything: Sequence[Unit]) -> dict[str, Any]:
    dense = [unit for unit in chosen if not unit.is_parameter]
    parameters = [unit for unit in chosen if unit.is_parameter]
    config: dict[str, Any] = {"peft_type": "LORA"}
    if draw(st.integers(0, 9)):
        rank = draw(_RANKS)
        config["r"] = float(rank) if draw(st.integers(0, 19)) == 0 else rank
        config["lora_alpha"] = draw(_ALPHAS)
    elif draw(st.booleans()):
        config |= {"r": None, "lora_alpha": None}  # some trainers write what they leave to PEFT
    if not parameters and draw(st.booleans()):
        config["lora_bias"] = draw(st.integers(0, 2)) == 0
    if draw(st.booleans()):
        config["use_rslora"] = draw(st.sampled_from((True, True, False, None)))
    targets = _targets(draw, dense) if dense else draw(st.sampled_from(([], None)))
    if parameters:
        depth = draw(st.sampled_from((2, 2, 3, 5)))
        tails = sorted({_tail(unit.rule_name, depth) for unit in parameters})
        config["target_parameters"] = draw(st.lists(st.sampled_from(tails), min_size=1, unique=True))
        targets = [] if targets is None and dense else targets
    if targets is not None or draw(st.booleans()):
        config["target_modules"] = targets
    names = [unit.rule_name for unit in chosen]
    for key, values in (("rank_pattern", _RANKS), ("alpha_pattern", _ALPHAS)):
        if patterns := _patterns(draw, names, values):
            config[key] = patterns
        elif draw(st.booleans()):
            config[key] = draw(st.sampled_from(({}, None)))
    if layout.startswith("flat") or draw(st.booleans()):
        versions = _OLD_VERSIONS if layout == "flat_crossed" else _NEW_VERSIONS
        config["peft_version"] = draw(st.sampled_from(versions))
    if layout.startswith("flat") and draw(st.integers(0, 3)) == 0:
        del config["peft_version"]
    _narrow(draw, config, everything)
    return _dress(draw, config, has_parameters=bool(parameters))


MANY_TARGETS = 20
"""From so many on PEFT rewrites `target_modules`."""


def _narrow(draw: Draw, config: dict[str, Any], everything: Sequence[Unit]) -> None:
    """`exclude_modules` and `layers_to_transform`, where they leave something and PEFT allows them."""
    targets = config.get("target_modules")
    if targets is None:
        return
    dense = [unit for unit in everything if not unit.is_parameter and targets_module(config, unit.rule_name)]
    if not dense:
        return
    limits: dict[str, Any] = {}
    name = draw(st.sampled_from(dense)).name
    leaf = _leaf(name)
    excludes: tuple[Any, ...] = (None, None, None, [], [leaf], [_tail(name, 2)], rf".*\.{leaf}")
    if not any(unit.is_parameter or _leaf(unit.name) == "qkv_proj" for unit in everything):
        # else one layer may look forgotten, as other model code has the same matrices one by one
        excludes += ([name], rf"model\.layers\.0\..*{leaf}")
    if (exclude := draw(st.sampled_from(excludes))) is not None:
        limits["exclude_modules"] = exclude
    # PEFT shortens twenty names and more to their endings, and then the layers count for full names too.
    if isinstance(targets, list) and len(targets) < MANY_TARGETS and draw(st.integers(0, 2)) == 0:
        layers = sorted({unit.layer for unit in everything if unit.layer != OUTSIDE})
        some = draw(st.lists(st.sampled_from(layers), min_size=1, unique=True))
        limits["layers_to_transform"] = some[0] if draw(st.booleans()) else some
        pattern = draw(st.sampled_from((None, "layers", ["layers"], ["h", "layers"], "", [])))
        if pattern is not None:
            limits["layers_pattern"] = pattern
    if any(targets_module({**config, **limits}, unit.rule_name) for unit in dense):
        config.update(limits)


def _held(draw: Draw, config: dict[str, Any], everything: Sequence[Unit]) -> list[Unit]:
    """What the file holds of what the config adapts: all of it, or less, but something of every layer."""
    old_peft = config.get("layers_to_transform") is not None and draw(st.integers(0, 2)) == 0
    adapted = [
        unit
        for unit in everything
        if (
            targets_parameter(config, unit.rule_name)
            if unit.is_parameter
            else targets_module(config, unit.rule_name, old_peft=old_peft)
        )
    ]
    if not adapted:  # old PEFT read this filter so that nothing was left
        adapted = [u for u in everything if not u.is_parameter and targets_module(config, u.rule_name)]
    share = draw(st.sampled_from((1.0, 1.0, 0.8, 0.3)))
    if share == 1.0:
        return adapted
    dice = np.random.default_rng(draw(st.integers(0, 2**16)))
    kept = [unit for unit in adapted if dice.random() < share]
    silent = {unit.layer for unit in adapted} - {unit.layer for unit in kept}
    return kept + [next(unit for unit in adapted if unit.layer == layer) for layer in sorted(silent)]


def _can_be_read(config: dict[str, Any], layout: Layout, held: Sequence[Unit]) -> tuple[bool, bool]:
    """Whether each flattened pair, and whether the file as a whole, tells which generation of PEFT wrote it."""
    square = [unit.in_dim == unit.out_dim for unit in held if unit.num_experts]
    if not square or not layout.startswith("flat") or "peft_version" in config:
        return True, True
    return not any(square), not all(square)


# Tensors ----------------------------------------------------------------------------------------------


def _tensors(draw: Draw, config: dict[str, Any], layout: Layout, held: Sequence[Unit]) -> dict[str, Array]:
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from((_DTYPES[0], *_DTYPES, None)))  # None: mixed
    zero = draw(st.sampled_from((0.0, 0.0, 0.3, 1.0)))
    is_blocked = draw(st.integers(0, 3)) == 0
    spread = draw(st.sampled_from((0.0, 0.0, 2.0)))
    prefix = draw(st.sampled_from((PREFIX,) * 16 + ("", PREFIX * 2, f"{PREFIX}_orig_mod.", f"module.{PREFIX}")))
    bare_weight = layout in ("stacked", "shared_outer") and draw(st.booleans())
    infixes = ("",) if bare_weight else ("",) * 7 + (".default",) * 3 + (".ranking", ".lora")
    infix = draw(st.sampled_from(infixes))
    tensors: dict[str, Array] = {}
    for unit in held:
        a_shape, b_shape = _shapes(unit, layout, rank_of(config, unit.rule_name))
        module = _module_in_file(unit, layout, config)
        if config.get("lora_bias"):
            tensors[f"{prefix}{module}.lora_B{infix}.bias"] = dice.standard_normal(unit.out_dim, np.float32)
        tail = "" if bare_weight and unit.num_experts else f"{infix}.weight"
        for half, shape in (("A", a_shape), ("B", b_shape)):
            values = dice.standard_normal(shape) * 0.2 * 10.0 ** dice.uniform(-spread, spread)
            if half == "B" and dice.random() < zero:
                values[...] = 0.0
            if is_blocked and _leaf(unit.name) == "gate_up_proj" and _out_half(layout) == half:
                _clear_corners(values, unit, layout)
            table = unit.name.endswith(EMBEDDING)
            key = f"lora_embedding_{half}{infix}" if table else f"lora_{half}{tail}"
            tensors[f"{prefix}{module}.{key}"] = values.astype(dtype or _DTYPES[dice.integers(3)])
    return tensors


def _out_half(layout: Layout) -> str:
    """Which tensor has the out axis of the base's matrix."""
    return "A" if layout == "flat_crossed" else "B"


def _clear_corners(values: Array, unit: Unit, layout: Layout) -> None:
    """Half of the ranks for gate and half for up, as PEFT joins two adapters into one: the other corners are zero."""
    number = max(unit.num_experts, 1)
    match layout:
        case "flat":
            blocks = values.reshape(2, unit.out_dim // 2, -1, number)  # gate or up, row, rank, expert
        case "flat_crossed":
            blocks = values.reshape(number, -1, 2, unit.out_dim // 2).transpose(2, 3, 1, 0)
        case _:
            blocks = np.moveaxis(values.reshape(-1, 2, unit.out_dim // 2, values.shape[-1]), 0, -1)
    half = blocks.shape[2] // 2
    blocks[0, :, half:] = 0.0
    blocks[1, :, :half] = 0.0


def _shapes(unit: Unit, layout: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    in_dim, out_dim, number = unit.in_dim, unit.out_dim, unit.num_experts
    if not number:
        return (rank, in_dim), (out_dim, rank)
    match layout:
        case "flat":
            return (number * rank, in_dim), (out_dim, number * rank)
        case "flat_crossed":
            return (number * rank, out_dim), (in_dim, number * rank)
        case _:
            is_down = _leaf(unit.name) in ("down_proj", "w2")
            num_a, num_b = (1 if unit.half_shared and not is_down else number), number
            if unit.half_shared and is_down:
                num_b = 1
            return (num_a, rank, in_dim), (num_b, out_dim, rank)


def _module_in_file(unit: Unit, layout: Layout, config: dict[str, Any]) -> str:
    """PEFT names a wrapped parameter by its module: the last parameter plainly, the one before it as its base layer."""
    if not unit.num_experts or not layout.startswith("flat"):
        return unit.name
    holder, _, leaf = unit.name.rpartition(".")
    is_inner = leaf == STACKED[0] and targets_parameter(config, f"{holder}.{STACKED[1]}")
    return f"{holder}.base_layer" if is_inner else holder


def _mlx_adapter(draw: Draw, base: int, held: Sequence[Unit]) -> Adapter:
    """As mlx-lm writes it: lower-case halves, both transposed, and a scale that no rank divides."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rank, dtype = draw(st.integers(1, 64)), draw(st.sampled_from(_DTYPES))
    config = {
        "fine_tune_type": "lora",
        "num_layers": card(base).num_layers,
        "lora_parameters": {"rank": rank, "scale": draw(st.sampled_from((0.5, 2.0, 20.0))), "dropout": 0.0},
    }
    tensors = {
        f"{unit.name}.lora_{half}": (dice.standard_normal(shape) * 0.2).astype(dtype)
        for unit in held
        if unit.layer != OUTSIDE
        for half, shape in (("a", (unit.in_dim, rank)), ("b", (rank, unit.out_dim)))
    }
    return Adapter(base, config, tensors, must_serve=True, notes=(KINDS[base], "mlx"), file_name=MLX_TENSORS_NAME)
