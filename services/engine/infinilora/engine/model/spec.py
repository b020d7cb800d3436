"""What a checkpoint's config.json says, as one record: the only place that knows architectures by name.

Everything below the reader sees differences as data (a bias here, a norm there), never a model's name. What
cannot be computed exactly is refused by name. Reads both spellings of transformers 4 and 5.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from infinilora.engine.model.rope import Rope, read_rope
from infinilora.protocol.errors import InvalidRequest

QkNorm = Literal["none", "head", "full"]
"""RMS norm of q and k: none; of each head (Qwen3); of the whole projection (OLMoE)."""


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """One kind of expert layer. `shared_dim` 0: no shared expert. Names are those of the checkpoint."""

    num_experts: int
    top_k: int
    expert_dim: int
    renormalise: bool
    shared_dim: int = 0
    block: str = "mlp"
    gate_name: str = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama-shaped decoder. `moe_layers` has one entry a layer: dense where False."""

    model_type: str
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    mlp_dim: int
    rope: Rope
    max_position: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    file_dtype: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    clip_qkv: float | None = None
    window: int | None = None
    moe: MoeSpec | None = None
    moe_layers: tuple[bool, ...] = ()

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_dim(self) -> int:
        return self.q_dim + 2 * self.kv_dim

    @property
    def max_exact_len(self) -> int:
        """Longest context that is computed exactly: attention here is always over the whole context."""
        return min(self.max_position, self.window or self.max_position)

    def moe_at(self, layer: int) -> MoeSpec | None:
        return self.moe if self.moe_layers[layer] else None


class _Config:
    """A config.json whose missing and odd values are named in the error."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def get(self, *keys: str, default: Any = None) -> Any:
        """The first of `keys` that is there and not null."""
        return next((self.values[k] for k in keys if self.values.get(k) is not None), default)

    def integer(self, *keys: str, default: int | None = None) -> int:
        value = self.get(*keys, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidRequest(f"{self.source}: {keys[0]} is {value!r}; wanted a whole number")
        return value

    def refuse(self, key: str, why: str) -> InvalidRequest:
        return InvalidRequest(f"{self.source}: {key} = {self.values.get(key)!r} is not supported: {why}")


def read_spec(directory: Path) -> ModelSpec:
    """Describe the checkpoint in `directory`; InvalidRequest if it cannot be served exactly."""
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise InvalidRequest(f"{directory} holds no config.json; wanted a Hugging Face model directory") from None
    except ValueError as error:
        raise InvalidRequest(f"{path}: not JSON ({error})") from None
    spec = spec_from_config(values, str(path))
    return replace(spec, eos_token_ids=_eos_ids(directory, spec.eos_token_ids))


def spec_from_config(values: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
    config = _Config(values, source)
    model_type = config.get("model_type", default="")
    family = _FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise InvalidRequest(f"{source}: model_type {model_type!r} is not supported; supported: {known}")
    if (act := config.get("hidden_act", "hidden_activation", default="silu")) != "silu":
        raise InvalidRequest(f"{source}: hidden_act {act!r} is not supported; wanted 'silu'")
    if config.get("quantization_config") is not None:
        raise config.refuse("quantization_config", "weights must be plain fp32, bf16 or fp16")
    return family(config, _dense(config))


def _dense(config: _Config) -> ModelSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=hidden // max(heads, 1))
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads == 0 or kv_heads == 0 or heads % kv_heads or head_dim % 2:
        raise InvalidRequest(
            f"{config.source}: {heads} heads over {kv_heads} KV heads of width {head_dim}; "
            "wanted a multiple and an even width"
        )
    num_layers = config.integer("num_hidden_layers")
    max_position = config.integer("max_position_embeddings")
    return ModelSpec(
        model_type=config.values["model_type"],
        num_layers=num_layers,
        hidden_dim=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", default=1e-6)),
        mlp_dim=config.integer("intermediate_size"),
        rope=read_rope(config.values, head_dim=head_dim, max_position=max_position, source=config.source),
        max_position=max_position,
        tied_embeddings=bool(config.get("tie_word_embeddings", default=False)),
        eos_token_ids=_id_list(config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
        file_dtype=str(config.get("dtype", "torch_dtype", default="float32")).removeprefix("torch."),
        moe_layers=(False,) * num_layers,
    )


def _llama(config: _Config, dense: ModelSpec) -> ModelSpec:
    bias = bool(config.get("attention_bias", default=False))
    mlp_bias = bool(config.get("mlp_bias", default=False))
    return replace(dense, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: _Config, dense: ModelSpec) -> ModelSpec:
    return replace(dense, window=config.get("sliding_window"))


def _qwen2(config: _Config, dense: ModelSpec) -> ModelSpec:
    bias = bool(config.get("qkv_bias", default=True))
    return replace(dense, qkv_bias=bias, window=_qwen_window(config))


def _qwen3(config: _Config, dense: ModelSpec) -> ModelSpec:
    bias = bool(config.get("attention_bias", default=False))
    return replace(dense, qkv_bias=bias, o_bias=bias, qk_norm="head", window=_qwen_window(config))


def _mixtral(config: _Config, dense: ModelSpec) -> ModelSpec:
    moe = MoeSpec(
        num_experts=config.integer("num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        expert_dim=dense.mlp_dim,
        renormalise=True,
        block="block_sparse_moe",
        gate_name="w1",
        up_name="w3",
        down_name="w2",
    )
    spec = replace(dense, window=config.get("sliding_window"))
    return _with_experts(config, spec, moe, every=1)


def _qwen2_moe(config: _Config, dense: ModelSpec) -> ModelSpec:
    moe = replace(_qwen_experts(config), shared_dim=config.integer("shared_expert_intermediate_size"))
    return _with_experts(config, _qwen2(config, dense), moe, every=config.integer("decoder_sparse_step", default=1))


def _qwen3_moe(config: _Config, dense: ModelSpec) -> ModelSpec:
    every = config.integer("decoder_sparse_step", default=1)
    return _with_experts(config, _qwen3(config, dense), _qwen_experts(config), every=every)


def _olmoe(config: _Config, dense: ModelSpec) -> ModelSpec:
    bias = bool(config.get("attention_bias", default=False))
    moe = replace(_qwen_experts(config), expert_dim=dense.mlp_dim)
    spec = replace(dense, qkv_bias=bias, o_bias=bias, qk_norm="full", clip_qkv=config.get("clip_qkv"))
    return _with_experts(config, spec, moe, every=1)


def _qwen_experts(config: _Config) -> MoeSpec:
    return MoeSpec(
        num_experts=config.integer("num_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        expert_dim=config.integer("moe_intermediate_size", default=0),
        renormalise=bool(config.get("norm_topk_prob", default=False)),
    )


def _with_experts(config: _Config, dense: ModelSpec, moe: MoeSpec, *, every: int) -> ModelSpec:
    """Expert layers are each `every`-th, counted from 1, save those that `mlp_only_layers` names."""
    if not 0 < moe.top_k <= moe.num_experts or moe.expert_dim == 0 or every == 0:
        raise InvalidRequest(
            f"{config.source}: {moe.top_k} of {moe.num_experts} experts of width {moe.expert_dim}, "
            f"each {every}-th layer; wanted 1 <= top_k <= experts, a width and a step"
        )
    dense_only = set(config.get("mlp_only_layers", default=[]))
    layers = tuple(layer not in dense_only and (layer + 1) % every == 0 for layer in range(dense.num_layers))
    return replace(dense, moe=moe, moe_layers=layers)


def _qwen_window(config: _Config) -> int | None:
    """Qwen keeps a window in its config that is off unless `use_sliding_window`."""
    return config.get("sliding_window") or None if config.get("use_sliding_window", default=False) else None


_FAMILIES: Mapping[str, Callable[[_Config, ModelSpec], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
}


def _id_list(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _eos_ids(directory: Path, from_config: tuple[int, ...]) -> tuple[int, ...]:
    """generation_config.json may name more ends of text than config.json (chat models do)."""
    path = directory / "generation_config.json"
    if not path.exists():
        return from_config
    try:
        more = _id_list(json.loads(path.read_text()).get("eos_token_id"))
    except ValueError as error:
        raise InvalidRequest(f"{path}: not JSON ({error})") from None
    return tuple(dict.fromkeys(more + from_config))
