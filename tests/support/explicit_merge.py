"""What the files of an adapter do to the weights of its base: W' = W + delta, dense, in float64, read the slow way.

The oracle of tests/property. Written from PEFT's documentation, its source (0.21.2) and the layouts that trainers
write; with `explicit_rules` and `explicit_files` it shares no line and no table with the code that it judges, and
it reads the files for itself.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infinilora.protocol.adapter import BaseCard
from support.explicit_files import (
    MLX_TENSORS_NAME,
    TENSORS_NAME,
    Array,
    biases_of,
    pairs_of,
    read_tensors,
)
from support.explicit_rules import (
    CONFIG_NAME,
    EMBEDDING,
    Config,
    NoMeaning,
    is_excluded,
    names_no_targets,
    rank_of,
    read_config,
    scale_of,
    targets_module,
    targets_parameter,
)

Deltas = dict[str, NDArray[np.float64]]
"""Module of the base, as its card names it (experts by number) -> W' - W [out, in].

`<module>.bias` -> what is added to its output whatever the input (`lora_bias`) [out].
"""

CROSSED_UNTIL = (0, 19, 0)
"""The last PEFT that read a stacked parameter [experts, out, in] as [experts, in, out]."""
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
STACKED = ("gate_up_proj", "down_proj")
"""The parameters of transformers' fused experts, in the order in which the module declares them."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix W [out, in] of the base."""

    layer: int
    site: str
    in_dim: int
    out_dim: int


def projections(card: BaseCard) -> dict[str, Projection]:
    """Every matrix of the base that a card knows, experts one by one, by its module name."""
    return {
        part.module.replace("{expert}", str(expert)): Projection(site.layer, site.site.label, site.in_dim, part.out_dim)
        for site in card.sites
        for part in site.parts
        for expert in range(site.num_experts or 1)
    }


def explicit_deltas(directory: Path, card: BaseCard) -> Deltas:
    """W' - W of every matrix that the adapter names. Raises NoMeaning."""
    try:
        return _read(directory, card)
    except re.error as error:
        raise NoMeaning(f"a pattern of the config: {error}") from error


def _read(directory: Path, card: BaseCard) -> Deltas:
    if (directory / MLX_TENSORS_NAME).exists() and not (directory / TENSORS_NAME).exists():
        return _read_mlx(directory, projections(card))
    config = read_config(directory / CONFIG_NAME)
    reader = _Reader(config, card, projections(card))
    tensors = read_tensors(directory / TENSORS_NAME)
    pairs = pairs_of(tensors)
    deltas = Deltas()
    for module, delta in [*reader.every_delta(pairs), *reader.every_bias(biases_of(tensors))]:
        if module in deltas:
            raise NoMeaning(f"{module} is adapted twice")
        deltas[module] = delta
    reader.demand_every_layer(deltas, pairs)
    return deltas


def _read_mlx(directory: Path, base: dict[str, Projection]) -> Deltas:
    """What mlx-lm writes: a [in, rank], b [rank, out], and the scale as it is, which no rank divides."""
    config = json.loads((directory / CONFIG_NAME).read_bytes())
    if config.get("fine_tune_type", "lora") != "lora" or "peft_type" in config:
        raise NoMeaning("not plain LoRA of mlx-lm")
    tensors, deltas = read_tensors(directory / MLX_TENSORS_NAME), Deltas()
    parameters = config.get("lora_parameters") or {}
    if not {"scale", "rank"} <= parameters.keys():
        raise NoMeaning("mlx-lm's own defaults are not in the file")
    scale, rank = float(parameters["scale"]), int(parameters["rank"])
    for module in sorted({key.rpartition(".")[0] for key in tensors}):
        a, b = tensors.pop(f"{module}.lora_a", None), tensors.pop(f"{module}.lora_b", None)
        if a is None or b is None or module not in base:
            raise NoMeaning(f"{module} is no module of the base, or half of one")
        _demand_shapes(module, a, b, (base[module].in_dim, rank), (rank, base[module].out_dim))
        deltas[module] = scale * (a @ b).T
    if tensors or not deltas:
        raise NoMeaning(f"tensors of no module: {sorted(tensors)}")
    return deltas


# From pairs to deltas ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fused:
    """The pair of one stacked parameter [experts, out, in] of transformers' fused experts, as PEFT flattens it."""

    experts: str
    """Module that holds the parameter, under the card's name."""
    leaf: str
    name: str
    a: Array
    b: Array


class _Reader:
    """Reads the pairs of one file by the rules of its config against one base."""

    def __init__(self, config: Config, card: BaseCard, base: dict[str, Projection]) -> None:
        self._config, self._base = config, base
        self._is_mixtral = card.model_type == "mixtral"

    def every_delta(self, pairs: Mapping[str, tuple[Array, Array]]) -> Iterator[tuple[str, Array]]:
        fused = []
        for name, (a, b) in pairs.items():
            module = self._card_name(name)
            parent, _, leaf = module.rpartition(".")
            if module.endswith((".experts", ".experts.base_layer")):
                fused.append(self._fused(name, module, a, b))
            elif a.ndim == 3 or b.ndim == 3:
                yield from self._stacked(name, self._experts_module(parent), leaf, a, b)
            else:
                yield from self._plain(name, module, a, b)
        is_crossed = self._are_crossed(fused)
        for one in fused:
            yield from self._flattened(one, is_crossed=is_crossed)

    def every_bias(self, biases: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """PEFT keeps the bias inside lora_B, so that what scales B scales it."""
        for name, bias in biases.items():
            if not self._config.get("lora_bias"):
                raise NoMeaning(f"{name} has a bias, and the config has no lora_bias")
            if name.endswith(EMBEDDING):
                raise NoMeaning("PEFT has no lora_bias for embeddings")
            rows = self._rows(self._card_name(name))
            if len(rows) > 1 and not self._is_covered(name):
                raise NoMeaning(f"{name} is no target, and has one bias")
            if bias.shape != (sum(self._base[row].out_dim for row in rows),):
                raise NoMeaning(f"the bias of {name} is {bias.shape}")
            for row, part in self._cut(rows, scale_of(self._config, name) * bias):
                yield f"{row}.bias", part

    def demand_every_layer(self, deltas: Deltas, names: Collection[str]) -> None:
        """A layer that the config adapts and the file is silent about is a broken save, not an adapter.

        `names`: the modules as the file calls them. A joined or stacked module is one that the trainer's model had
        only where they tell so, in any layer; a parameter is one where the config says so.
        """
        old_mixtral, kinds = any(".block_sparse_moe." in name for name in names), set(map(_kind, names))
        seen = {self._base[module.removesuffix(".bias")].layer for module in deltas if ".layers." in module}
        for module, projection in self._base.items():
            if ".layers." not in module or projection.layer in seen:
                continue
            single, *others = self._trainers_names(module, old_mixtral=old_mixtral)
            modules = [single, *(name for name in others if _kind(name) in kinds)]
            if any(is_excluded(self._config.get("exclude_modules"), name) for name in modules):
                continue
            if self._is_adapted(modules, parameters=[f"{single}.weight", *others]):
                raise NoMeaning(f"layer {projection.layer} is targeted ({module}) and absent")

    def _card_name(self, name: str) -> str:
        if not self._is_mixtral:
            return name
        parent, _, leaf = name.rpartition(".")
        return f"{parent}.{_MIXTRAL.get(leaf, leaf)}".replace(".block_sparse_moe.", ".mlp.")

    def _trainers_names(self, module: str, *, old_mixtral: bool) -> Iterator[str]:
        """What the trainer's model calls the module, and joined modules or parameters that may hold it there."""
        parent, _, leaf = module.rpartition(".")
        if old_mixtral and ".mlp." in module:
            yield from _names_in_old_mixtral(parent, leaf)
            return
        yield module
        yield from (f"{parent}.{joined}" for joined, parts in _JOINED.items() if leaf in parts)
        if expert := re.fullmatch(r"(.+\.experts)\.\d+", parent):
            yield f"{expert[1]}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"

    def _is_adapted(self, modules: Sequence[str], parameters: Sequence[str]) -> bool:
        if names_no_targets(self._config):
            return False
        return any(targets_module(self._config, name) for name in modules) or any(
            targets_parameter(self._config, name) for name in parameters
        )

    def _is_covered(self, name: str) -> bool:
        return (
            targets_module(self._config, name)
            or targets_module(self._config, name, old_peft=True)
            or targets_parameter(self._config, name)
        )

    def _rule_names(self, name: str, parts: Sequence[str]) -> list[str]:
        """What the config knows each part by: the module's name, or where it has only the parts', theirs."""
        if self._is_covered(name):
            return [name] * len(parts)
        keys = [f"{part}.weight" if targets_parameter(self._config, f"{part}.weight") else part for part in parts]
        if not all(map(self._is_covered, keys)):
            raise NoMeaning(f"{name} is in the file and no rule of the config adapts it")
        return keys

    def _plain(self, name: str, module: str, a: Array, b: Array) -> Iterator[tuple[str, Array]]:
        rows = self._rows(module)
        by_parameter = targets_parameter(self._config, f"{name}.weight")
        holder = name.rpartition(".")[0]
        parts = [f"{holder}.{row.rpartition('.')[2]}" for row in rows] if len(rows) > 1 else [name]
        keys = self._rule_names(f"{name}.weight" if by_parameter else name, parts)
        in_dim, out_dim = self._base[rows[0]].in_dim, sum(self._base[row].out_dim for row in rows)
        for rank in {rank_of(self._config, key) for key in keys}:
            _demand_shapes(name, a, b, (rank, in_dim), (out_dim, rank))
        for (row, part), key in zip(self._cut(rows, b @ a), keys, strict=True):
            yield row, scale_of(self._config, key) * part

    def _rows(self, module: str) -> list[str]:
        """The matrices of the base that this module's output rows are, in order."""
        parent, _, leaf = module.rpartition(".")
        rows = [module] if module in self._base else [f"{parent}.{part}" for part in _JOINED.get(leaf, ())]
        if not rows or any(row not in self._base for row in rows):
            raise NoMeaning(f"{module} is no module of the base")
        return rows

    def _cut(self, rows: Sequence[str], delta: Array) -> Iterator[tuple[str, Array]]:
        at = 0
        for row in rows:
            yield row, delta[at : at + self._base[row].out_dim]
            at += self._base[row].out_dim

    def _experts_module(self, parent: str) -> str:
        return f"{parent}.experts" if self._is_mixtral and parent.endswith(".mlp") else parent

    def _num_experts(self, experts: str) -> int:
        number = sum(f"{experts}.{e}.down_proj" in self._base for e in range(len(self._base)))
        if not number:
            raise NoMeaning(f"{experts} holds no experts in the base")
        return number

    def _stacked(self, name: str, experts: str, leaf: str, a: Array, b: Array) -> Iterator[tuple[str, Array]]:
        """A [experts or 1, rank, in], B [experts or 1, out, rank]; 1: one matrix for all experts."""
        number = self._num_experts(experts)
        if self._config.get("lora_bias"):
            raise NoMeaning("PEFT has no lora_bias for parameters")
        if a.ndim != 3 or b.ndim != 3 or not {a.shape[0], b.shape[0]} <= {1, number}:
            raise NoMeaning(f"{name} is not stacked by {number} experts")
        for expert in range(number):
            rows = self._rows(f"{experts}.{expert}.{leaf}")
            one_a, one_b = a[expert % a.shape[0]], b[expert % b.shape[0]]
            out_dim = sum(self._base[row].out_dim for row in rows)
            parts = [f"{experts}.{expert}.{row.rpartition('.')[2]}" for row in rows]
            keys = self._rule_names(name, parts)
            for rank in {rank_of(self._config, key) for key in keys}:
                _demand_shapes(name, one_a, one_b, (rank, self._base[rows[0]].in_dim), (out_dim, rank))
            for (row, part), key in zip(self._cut(rows, one_b @ one_a), keys, strict=True):
                yield row, scale_of(self._config, key) * part

    def _fused(self, name: str, module: str, a: Array, b: Array) -> _Fused:
        """Which parameter a pair at the experts' own name belongs to: PEFT nests one wrapper for each parameter."""
        experts, holder = module.removesuffix(".base_layer"), name.removesuffix(".base_layer")
        if self._config.get("lora_bias"):
            raise NoMeaning("PEFT has no lora_bias for parameters")
        either = [_Fused(experts, leaf, f"{holder}.{leaf}", a, b) for leaf in STACKED]
        if names_no_targets(self._config):
            wrapped, depth = [one for one in either if self._readings(one)], 0
        else:
            wrapped, depth = (
                [one for one in either if targets_parameter(self._config, one.name)],
                int(module != experts),
            )
        if len(wrapped) <= depth:
            raise NoMeaning(f"{name} is wrapped and neither target_parameters nor its shapes say what for")
        return wrapped[-1 - depth]  # the last parameter is the outermost wrapper

    def _fused_shapes(self, one: _Fused, *, is_crossed: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        number = self._num_experts(one.experts)
        rows = self._rows(f"{one.experts}.0.{one.leaf}")
        in_dim, out_dim = self._base[rows[0]].in_dim, sum(self._base[row].out_dim for row in rows)
        if is_crossed:
            in_dim, out_dim = out_dim, in_dim
        rank = number * rank_of(self._config, one.name)
        return (rank, in_dim), (out_dim, rank)

    def _are_crossed(self, fused: Sequence[_Fused]) -> bool:
        """Whether old PEFT wrote this file, which took the out axis for the in axis: by shapes, else by its version."""
        readings = set.intersection({False, True}, *map(self._readings, fused))
        if not readings:
            raise NoMeaning("the shapes of the fused experts fit no generation of PEFT")
        if len(readings) == 1 or not fused:
            return readings == {True}
        version = re.match(r"(\d+)\.(\d+)\.(\d+)", self._config.get("peft_version") or "")
        if version is None:
            raise NoMeaning("square fused experts of an unknown generation of PEFT")
        return tuple(int(number) for number in version.groups()) <= CROSSED_UNTIL

    def _readings(self, one: _Fused) -> set[bool]:
        """As which of PEFT's generations' its shapes fit: crossed, not crossed, both or neither."""
        found = one.a.shape, one.b.shape
        return {crossed for crossed in (False, True) if found == self._fused_shapes(one, is_crossed=crossed)}

    def _flattened(self, one: _Fused, *, is_crossed: bool) -> Iterator[tuple[str, Array]]:
        """Rows of A: expert by expert, all ranks of each. Columns of B: rank by rank, all experts of each."""
        number, rank = self._num_experts(one.experts), rank_of(self._config, one.name)
        for expert in range(number):
            a = one.a[expert * rank : (expert + 1) * rank]
            delta = scale_of(self._config, one.name) * (one.b[:, expert::number] @ a)
            yield from self._cut(self._rows(f"{one.experts}.{expert}.{one.leaf}"), delta.T if is_crossed else delta)


def _names_in_old_mixtral(parent: str, leaf: str) -> Iterator[str]:
    """A module by its name until transformers 4.57, and the parameters of all experts that others made of it."""
    leaf = {new: old for old, new in _MIXTRAL.items()}.get(leaf, leaf)
    parent = parent.replace(".mlp", ".block_sparse_moe")
    yield f"{parent}.{leaf}"
    if expert := re.fullmatch(r"(.+)\.experts\.\d+", parent):
        yield f"{expert[1]}.{leaf}"
        yield f"{expert[1]}.experts.{leaf}"


def _kind(name: str) -> str:
    """A module's name in any layer, of any expert."""
    return re.sub(r"\.\d+\.", ".#.", name)


def _demand_shapes(name: str, a: Array, b: Array, a_shape: tuple[int, int], b_shape: tuple[int, int]) -> None:
    if (a.shape, b.shape) != (a_shape, b_shape):
        raise NoMeaning(f"{name}: A {a.shape}, B {b.shape}; the base and the config want {a_shape}, {b_shape}")


def disagreement(found: Deltas, wanted: Deltas, card: BaseCard, *, tolerance: float = 1e-5) -> str | None:
    """Where the two differ, if they do: any matrix by more than `tolerance` of its own largest value, or a site
    that is there and should not be."""
    base = projections(card)
    base |= {f"{module}.bias": projection for module, projection in base.items()}
    sites = {(base[module].layer, base[module].site) for module in wanted}
    for module in sorted(found.keys() | wanted.keys()):
        want, have = wanted.get(module), found.get(module)
        if want is None and have is not None:
            if (base[module].layer, base[module].site) not in sites:
                return f"{module}: its whole site should be absent"
            want = np.zeros_like(have)
        assert want is not None
        error = float(np.abs((0.0 if have is None else have) - want).max())
        largest = float(np.abs(want).max())
        if not error <= tolerance * largest:
            return f"{module}: off by {error:.3g}; its largest value should be {largest:.3g}"
    return None
