"""What the files of an adapter do to the weights of its base: W' = W + delta, dense, in float64, read the slow way.

The oracle of tests/property. Written from PEFT's documentation, its source (0.21.2) and the layouts that trainers
write; it shares no line and no table with the code that it judges, and it reads the files for itself.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from infinilora.protocol.adapter import BaseCard

Array = NDArray[Any]
Config = Mapping[str, Any]
Deltas = dict[str, NDArray[np.float64]]
"""Module of the base, as its card names it (experts by number) -> W' - W [out, in].

`<module>.bias` -> what is added to its output whatever the input (`lora_bias`) [out].
"""

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
MLX_TENSORS_NAME = "adapters.safetensors"
DEFAULT_RANK, DEFAULT_ALPHA = 8, 8
CROSSED_UNTIL = (0, 19, 0)
"""The last PEFT that read a stacked parameter [experts, out, in] as [experts, in, out]."""

_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights",
    "bias", "peft_version",
}  # fmt: skip
_NO_MATTER = {
    "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout", "auto_mapping",
    "fan_in_fan_out", "megatron_core", "qalora_group_size", "eva_config", "corda_config", "loftq_config",
    "lora_ga_config", "runtime_config", "lora_bias",
}  # fmt: skip
"""Of no effect on W' once trained. `lora_bias` says that there are tensors beside it, and those are read."""
_INITS_THAT_KEEP_THE_BASE = {"gaussian", "eva", "orthogonal"}

_WRAPPERS = ("base_model.model.", "_orig_mod.", "module.", "_fsdp_wrapped_module.")
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))??(?P<weight>\.weight)?")
_EMBEDDING = "embed_tokens"
_EMBEDDING_KEY = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?")
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
STACKED = ("gate_up_proj", "down_proj")
"""The parameters of transformers' fused experts, in the order in which the module declares them."""


class NoMeaning(Exception):
    """The files say nothing definite about this base: who serves them makes something up."""


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
    config = _read_config(directory / CONFIG_NAME)
    reader = _Reader(config, card, projections(card))
    tensors = _read_tensors(directory / TENSORS_NAME)
    pairs = _pairs({key: tensor for key, tensor in tensors.items() if not key.endswith(".bias")})
    deltas = Deltas()
    for module, delta in [*reader.every_delta(pairs), *reader.every_bias(tensors)]:
        if module in deltas:
            raise NoMeaning(f"{module} is adapted twice")
        deltas[module] = delta
    reader.demand_every_layer(deltas, old_mixtral=any(".block_sparse_moe." in name for name in pairs))
    return deltas


# The rules of the config -------------------------------------------------------------------------


def rank_of(config: Config, name: str) -> int:
    """The first pattern, in file order, that is the name or a dotted tail of it; else `r`."""
    return int(_by_pattern(config.get("rank_pattern"), name, _given(config, "r", DEFAULT_RANK)))


def scale_of(config: Config, name: str) -> float:
    """alpha / r, or alpha / sqrt(r), with the alpha and the r of this module."""
    alpha = float(_by_pattern(config.get("alpha_pattern"), name, _given(config, "lora_alpha", DEFAULT_ALPHA)))
    rank = rank_of(config, name)
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _given(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise


def targets_module(config: Config, name: str, *, old_peft: bool = False) -> bool:
    """Whether PEFT wraps this linear module. `old_peft`: it took the last number of a name for the layer."""
    targets = config.get("target_modules")
    if _is_excluded(config.get("exclude_modules"), name):
        return False
    if targets is None:
        return not config.get("target_parameters")  # nothing said at all: what is in the file is what was trained
    if isinstance(targets, str):
        is_linear = name != "lm_head" and not name.endswith(_EMBEDDING)
        return (targets.lower() == "all-linear" and is_linear) or re.fullmatch(targets, name) is not None
    if name in targets:
        return True  # what is named in full is adapted whatever its layer
    return _is_named(targets, name) and _is_in_layers(config, name, last=old_peft)


def targets_parameter(config: Config, name: str) -> bool:
    """Whether PEFT wraps this parameter by `target_parameters`."""
    return _is_named(config.get("target_parameters") or (), name)


def _is_named(names: Sequence[str], name: str) -> bool:
    return any(name == known or name.endswith(f".{known}") for known in names)


def _is_excluded(exclude: Any, name: str) -> bool:
    if isinstance(exclude, str):
        return bool(exclude) and re.fullmatch(exclude, name) is not None
    return _is_named(exclude or (), name)


def _is_in_layers(config: Config, name: str, *, last: bool) -> bool:
    wanted = config.get("layers_to_transform")
    if wanted is None or wanted == []:
        return True
    any_text = ".*" if last else ".*?"
    patterns = config.get("layers_pattern") or None
    patterns = [patterns] if isinstance(patterns, str) else patterns
    forms = [rf"{any_text}\.[^.]*\.(\d+)\."] if not patterns else [rf"(?:^|{any_text}\.){p}\.(\d+)\." for p in patterns]
    for form in forms:
        if found := re.match(form, name):
            return int(found[1]) in ([wanted] if isinstance(wanted, int) else wanted)
    return False


def _read_config(path: Path) -> Config:
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise NoMeaning(f"config: {error}") from error
    if not isinstance(config, dict):
        raise NoMeaning("config is not an object")
    if config.get("peft_type") != "LORA":
        raise NoMeaning(f"peft_type {config.get('peft_type')!r}")
    if config.get("bias") not in (None, "none"):
        raise NoMeaning("trained biases")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _INITS_THAT_KEEP_THE_BASE:
        raise NoMeaning(f"init {init!r} changed the base")
    active = [key for key, value in config.items() if value and key not in _READ | _NO_MATTER]
    if active:
        raise NoMeaning(f"unknown and active: {active}")
    return config


# The tensors -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pair:
    a: Array | None = None
    b: Array | None = None


def _read_tensors(path: Path) -> dict[str, Array]:
    """float64 copies of every tensor of the file."""
    try:
        raw = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise NoMeaning(f"weights: {error}") from error
    return {name: _numbers(name, str(t["dtype"]), t["shape"], bytes(t["data"])) for name, t in raw}


def _numbers(name: str, dtype: str, shape: Sequence[int], data: bytes) -> Array:
    match dtype:
        case "F32" | "F16" | "F64":
            values = np.frombuffer(data, f"<f{int(dtype[1:]) // 8}").astype(np.float64)
        case "BF16":  # the upper half of a float32
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case _:
            raise NoMeaning(f"{name} is {dtype}")
    if not np.isfinite(values).all():
        raise NoMeaning(f"{name} is not finite")
    return values.reshape(shape)


def _pairs(tensors: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """(A, B) by module name, wrappers' prefixes and the adapter's own name taken off."""
    found: dict[str, _Pair] = {}
    prefixes, adapters = set(), set()
    for key, tensor in tensors.items():
        bare = _unwrapped(key)
        parts = _EMBEDDING_KEY.fullmatch(bare) or _KEY.fullmatch(bare)
        is_embedding = parts is not None and parts.re is _EMBEDDING_KEY
        if parts is None or not (is_embedding or parts["weight"] or tensor.ndim == 3):
            raise NoMeaning(f"{key} is no half of a pair")
        if is_embedding != parts["module"].endswith(_EMBEDDING):
            raise NoMeaning(f"{key} takes a matrix for a table, or a table for a matrix")
        prefixes.add(key.removesuffix(bare))
        adapters.add(parts["adapter"])
        pair = found.setdefault(parts["module"], _Pair())
        if (pair.a if parts["half"] == "A" else pair.b) is not None:
            raise NoMeaning(f"{key} is there twice")
        if parts["half"] == "A":
            pair.a = tensor
        else:
            pair.b = tensor
    if not found:
        raise NoMeaning("no tensors")
    if len(prefixes) > 1 or len(adapters) > 1:
        raise NoMeaning(f"more than one file in one: prefixes {prefixes}, adapters {adapters}")
    return {module: _whole(module, pair) for module, pair in found.items()}


def _unwrapped(key: str) -> str:
    while wrapper := next((w for w in _WRAPPERS if key.startswith(w)), None):
        key = key.removeprefix(wrapper)
    return key


def _whole(module: str, pair: _Pair) -> tuple[Array, Array]:
    if pair.a is None or pair.b is None:
        raise NoMeaning(f"half a pair: {module}")
    return pair.a, pair.b


def _read_mlx(directory: Path, base: dict[str, Projection]) -> Deltas:
    """What mlx-lm writes: a [in, rank], b [rank, out], and the scale as it is, which no rank divides."""
    config = json.loads((directory / CONFIG_NAME).read_bytes())
    if config.get("fine_tune_type", "lora") != "lora" or "peft_type" in config:
        raise NoMeaning("not plain LoRA of mlx-lm")
    tensors, deltas = _read_tensors(directory / MLX_TENSORS_NAME), Deltas()
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

    def every_bias(self, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """PEFT keeps the bias inside lora_B, so that what scales B scales it."""
        for key, bias in tensors.items():
            if not key.endswith(".bias"):
                continue
            parts = _KEY.fullmatch(_unwrapped(key.removesuffix("bias") + "weight"))
            if parts is None or parts["half"] != "B" or not self._config.get("lora_bias"):
                raise NoMeaning(f"{key} is no bias of LoRA's")
            if key.removesuffix("bias") + "weight" not in tensors:
                raise NoMeaning(f"{key} stands alone")
            name = parts["module"]
            if name.endswith(_EMBEDDING):
                raise NoMeaning("PEFT has no lora_bias for embeddings")
            rows = self._rows(self._card_name(name))
            if bias.shape != (sum(self._base[row].out_dim for row in rows),):
                raise NoMeaning(f"{key} is {bias.shape}")
            for row, part in self._cut(rows, scale_of(self._config, name) * bias):
                yield f"{row}.bias", part

    def demand_every_layer(self, deltas: Deltas, *, old_mixtral: bool) -> None:
        """A layer that the config adapts and the file is silent about is a broken save, not an adapter."""
        seen = {self._base[module.removesuffix(".bias")].layer for module in deltas if ".layers." in module}
        for module, projection in self._base.items():
            if ".layers." not in module or projection.layer in seen:
                continue
            names = list(self._trainers_names(module, old_mixtral=old_mixtral))
            if self._is_any_excluded(names):
                continue
            if any(self._is_targeted(name) for name in names):
                raise NoMeaning(f"layer {projection.layer} is targeted ({module}) and absent")

    def _card_name(self, name: str) -> str:
        if not self._is_mixtral:
            return name
        parent, _, leaf = name.rpartition(".")
        return f"{parent}.{_MIXTRAL.get(leaf, leaf)}".replace(".block_sparse_moe.", ".mlp.")

    def _trainers_names(self, module: str, *, old_mixtral: bool) -> Iterator[str]:
        """What the trainer's model calls the module, and the joined module or parameter that may hold it there."""
        parent, _, leaf = module.rpartition(".")
        if old_mixtral and ".mlp." in module:
            old = {new: old for old, new in _MIXTRAL.items()}
            parent = parent.replace(".mlp", ".block_sparse_moe")
            yield f"{parent}.{old.get(leaf, leaf)}"
            return
        yield module
        yield f"{module}.weight"
        yield from (f"{parent}.{joined}" for joined, parts in _JOINED.items() if leaf in parts)
        if expert := re.fullmatch(r"(.+\.experts)\.\d+", parent):
            yield f"{expert[1]}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"

    def _is_any_excluded(self, names: Sequence[str]) -> bool:
        return any(_is_excluded(self._config.get("exclude_modules"), name) for name in names)

    def _is_targeted(self, name: str) -> bool:
        if self._config.get("target_modules") is None and not self._config.get("target_parameters"):
            return False
        return targets_module(self._config, name) or targets_parameter(self._config, name)

    def _demand_cover(self, name: str) -> None:
        if not (
            targets_module(self._config, name)
            or targets_module(self._config, name, old_peft=True)
            or targets_parameter(self._config, name)
        ):
            raise NoMeaning(f"{name} is in the file and no rule of the config adapts it")

    def _plain(self, name: str, module: str, a: Array, b: Array) -> Iterator[tuple[str, Array]]:
        rows = self._rows(module)
        by_parameter = targets_parameter(self._config, f"{name}.weight")
        key = f"{name}.weight" if by_parameter else name
        self._demand_cover(key)
        rank, in_dim = rank_of(self._config, key), self._base[rows[0]].in_dim
        _demand_shapes(name, a, b, (rank, in_dim), (sum(self._base[r].out_dim for r in rows), rank))
        yield from self._cut(rows, scale_of(self._config, key) * (b @ a))

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
        self._demand_cover(name)
        rank, scale = rank_of(self._config, name), scale_of(self._config, name)
        if self._config.get("lora_bias"):
            raise NoMeaning("PEFT has no lora_bias for parameters")
        if a.ndim != 3 or b.ndim != 3 or not {a.shape[0], b.shape[0]} <= {1, number}:
            raise NoMeaning(f"{name} is not stacked by {number} experts")
        for expert in range(number):
            rows = self._rows(f"{experts}.{expert}.{leaf}")
            one_a, one_b = a[expert % a.shape[0]], b[expert % b.shape[0]]
            out_dim = sum(self._base[row].out_dim for row in rows)
            _demand_shapes(name, one_a, one_b, (rank, self._base[rows[0]].in_dim), (out_dim, rank))
            yield from self._cut(rows, scale * (one_b @ one_a))

    def _fused(self, name: str, module: str, a: Array, b: Array) -> _Fused:
        """Which parameter a pair at the experts' own name belongs to: PEFT nests one wrapper for each parameter."""
        experts, holder = module.removesuffix(".base_layer"), name.removesuffix(".base_layer")
        wrapped = [leaf for leaf in STACKED if targets_parameter(self._config, f"{holder}.{leaf}")]
        depth = 1 if module != experts else 0
        if len(wrapped) <= depth or self._config.get("lora_bias"):
            raise NoMeaning(f"{name} is wrapped and target_parameters do not say what for")
        leaf = wrapped[-1 - depth]  # the last parameter is the outermost wrapper
        return _Fused(experts, leaf, f"{holder}.{leaf}", a, b)

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
        fits = [
            {is_crossed for is_crossed in (False, True) if self._fused_fits(one, is_crossed=is_crossed)}
            for one in fused
        ]
        readings = set.intersection({False, True}, *fits)
        if not readings:
            raise NoMeaning("the shapes of the fused experts fit no generation of PEFT")
        if len(readings) == 1 or not fused:
            return readings == {True}
        version = re.match(r"(\d+)\.(\d+)\.(\d+)", self._config.get("peft_version") or "")
        if version is None:
            raise NoMeaning("square fused experts of an unknown generation of PEFT")
        return tuple(int(number) for number in version.groups()) <= CROSSED_UNTIL

    def _fused_fits(self, one: _Fused, *, is_crossed: bool) -> bool:
        return (one.a.shape, one.b.shape) == self._fused_shapes(one, is_crossed=is_crossed)

    def _flattened(self, one: _Fused, *, is_crossed: bool) -> Iterator[tuple[str, Array]]:
        """Rows of A: expert by expert, all ranks of each. Columns of B: rank by rank, all experts of each."""
        number, rank = self._num_experts(one.experts), rank_of(self._config, one.name)
        for expert in range(number):
            a = one.a[expert * rank : (expert + 1) * rank]
            delta = scale_of(self._config, one.name) * (one.b[:, expert::number] @ a)
            yield from self._cut(self._rows(f"{one.experts}.{expert}.{one.leaf}"), delta.T if is_crossed else delta)


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
