"""How adapters lie in files: the pairs that a file of each layout may hold for each of some bases, and their shapes.

A table and pure functions; nothing is drawn here, and nothing is said of what a file means.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from infinilora.protocol.adapter import BaseCard
from support.cards import make_card
from support.explicit_files import Array
from support.explicit_merge import STACKED, projections
from support.explicit_rules import targets_parameter

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
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@cache
def card(base: int) -> BaseCard:
    kind, sizes = _BASES[base]
    return make_card(kind, **sizes)


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


def leaf_of(name: str) -> str:
    return name.rpartition(".")[2]


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


def out_half(layout: Layout) -> str:
    """Which tensor has the out axis of the base's matrix."""
    return "A" if layout == "flat_crossed" else "B"


def clear_corners(values: Array, unit: Unit, layout: Layout) -> None:
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


def shapes(unit: Unit, layout: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of A and B."""
    in_dim, out_dim, number = unit.in_dim, unit.out_dim, unit.num_experts
    if not number:
        return (rank, in_dim), (out_dim, rank)
    match layout:
        case "flat":
            return (number * rank, in_dim), (out_dim, number * rank)
        case "flat_crossed":
            return (number * rank, out_dim), (in_dim, number * rank)
        case _:
            is_down = leaf_of(unit.name) in ("down_proj", "w2")
            num_a, num_b = (1 if unit.half_shared and not is_down else number), number
            if unit.half_shared and is_down:
                num_b = 1
            return (num_a, rank, in_dim), (num_b, out_dim, rank)


def module_in_file(unit: Unit, layout: Layout, config: dict[str, Any]) -> str:
    """PEFT names a wrapped parameter by its module: the last parameter plainly, the one before it as its base layer."""
    if not unit.num_experts or not layout.startswith("flat"):
        return unit.name
    holder, _, leaf = unit.name.rpartition(".")
    is_inner = leaf == STACKED[0] and targets_parameter(config, f"{holder}.{STACKED[1]}")
    return f"{holder}.base_layer" if is_inner else holder
