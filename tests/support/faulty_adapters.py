"""Single faults in adapters that were good: in a name, a tensor, a key of the config, or the bytes of the file."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from support.explicit_files import Array
from support.random_adapters import PREFIX, Adapter, file_bytes
from support.random_configs import Draw

_ACTIVE_KEYS: tuple[tuple[str, Any], ...] = (
    ("use_dora", True),
    ("lora_bias", True),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("modules_to_save", ["lm_head"]),
    ("layer_replication", [[0, 2], [0, 2]]),
    ("alora_invocation_tokens", [6, 7]),
    ("trainable_token_indices", [1, 2]),
    ("use_qalora", True),
    ("use_bdlora", {"nblocks": 2}),
    ("velora_config", {"rank": 1}),
    ("kasa_config", {"beta": 1}),
    ("arrow_config", {"top_k": 2}),
    ("future_feature", {"x": 1}),
    ("future_flag", True),
    ("future_number", 3),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_4"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "lora_ga"),
    ("init_lora_weights", "not-invented-yet"),
    ("peft_type", "IA3"),
    ("peft_type", "ADALORA"),
    ("peft_type", "lora"),
    ("peft_type", None),
    ("use_rslora", True),
    ("r", 5),
    ("lora_alpha", 3),
    ("fan_in_fan_out", True),
    ("target_modules", ["q_proj"]),
    ("target_modules", []),
    ("exclude_modules", ["v_proj", "w3", "up_proj"]),
    ("exclude_modules", r".*\.1\..*"),
    ("layers_to_transform", [0]),
    ("layers_to_transform", 1),
    ("target_parameters", ["mlp.experts.down_proj"]),
    ("target_parameters", None),
    ("rank_pattern", {"layers.0.*": 2}),
    ("rank_pattern", {"[": 2}),
    ("alpha_pattern", {r".*\.down_proj|.*w2": 99, "q_proj": 7}),
    ("peft_version", "0.17.0"),
    ("peft_version", "0.21.2"),
)

FAULTS = (
    "rename",
    "swap",
    "transpose",
    "drop_half",
    "drop_pair",
    "drop_layer",
    "wrong_in",
    "wrong_out",
    "wrong_rank",
    "flatten",
    "not_finite",
    "other_dtype",
    "cut",
    "longer",
    "header",
    "extra",
    "infix",
    "prefix",
    "key",
    "key",
    "key",
    "drop_key",
)


@st.composite
def faulty(draw: Draw, good: st.SearchStrategy[Adapter]) -> Adapter:
    """A good adapter with one thing about it changed. It may still mean something: then it means that."""
    adapter: Adapter = draw(good)
    kind = draw(st.sampled_from(FAULTS))
    name = draw(st.sampled_from(sorted(adapter.tensors)))
    tensors, config = dict(adapter.tensors), dict(adapter.config)
    raw: bytes | None = None
    match kind:
        case "key":
            key, value = draw(st.sampled_from(_ACTIVE_KEYS))
            config[key] = value
            kind = f"{key}={value}"
        case "drop_key":
            config.pop(draw(st.sampled_from(sorted(config))))
        case "cut" | "longer" | "header":
            raw = _damaged(draw, kind, file_bytes(tensors))
        case _:
            tensors = _changed(draw, kind, tensors, name)
    return replace(
        adapter, config=config, tensors=tensors, raw=raw, must_serve=False, notes=(*adapter.notes, kind, name)
    )


def _damaged(draw: Draw, kind: str, data: bytes) -> bytes:
    match kind:
        case "cut":
            end: int = draw(st.integers(0, len(data) - 1))
            return data[:end]
        case "longer":
            return data + bytes(draw(st.integers(1, 9)))
        case _:
            at: int = draw(st.integers(0, 7 + int.from_bytes(data[:8], "little")))
            return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]


def _changed(draw: Draw, kind: str, tensors: dict[str, Array], name: str) -> dict[str, Array]:
    tensor, module = tensors[name], name.partition(".lora_")[0]
    other_half = name.replace(".lora_A", ".lora_B") if ".lora_A" in name else name.replace(".lora_B", ".lora_A")
    match kind:
        case "rename":
            new = _renamed(draw, name)
            return {(new if key == name else key): value for key, value in tensors.items()}
        case "swap":
            other = draw(st.sampled_from(sorted(tensors)))
            return {**tensors, name: tensors[other], other: tensor}
        case "drop_half":
            return {key: value for key, value in tensors.items() if key != name}
        case "drop_pair":
            return {key: value for key, value in tensors.items() if key not in (name, other_half)}
        case "drop_layer":
            layer = re.search(r"\.layers\.\d+\.", name)
            return {key: value for key, value in tensors.items() if layer is None or layer[0] not in key}
        case "extra":
            return {**tensors, _renamed(draw, name): tensor}
        case "infix":
            return {**tensors, re.sub(r"\.lora_([AB])", r".lora_\1.other", name, count=1): tensors.pop(name)}
        case "prefix":
            return {**tensors, name.removeprefix(PREFIX): tensors.pop(name)}
        case "wrong_rank" if f"{module}.lora_A.weight" in tensors and f"{module}.lora_B.weight" in tensors:
            a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
            return {
                **tensors,
                f"{module}.lora_A.weight": np.concatenate([a, a], axis=-2),
                f"{module}.lora_B.weight": np.concatenate([b, b], axis=-1),
            }
        case _:
            return {**tensors, name: _reshaped(draw, kind, tensor)}


def _renamed(draw: Draw, name: str) -> str:
    old, new = draw(
        st.sampled_from(
            (
                ("q_proj", "k_proj"),
                ("q_proj", "Q_proj"),
                ("k_proj", "v_proj"),
                ("gate_proj", "up_proj"),
                ("w1", "w3"),
                ("w3", "w4"),
                ("layers.0.", "layers.1."),
                ("layers.0.", "layers.7."),
                ("layers.1.", "layers.01."),
                ("layers.", "layer."),
                ("experts.0", "experts.1"),
                ("experts.1", "experts.99"),
                ("experts.", "expert."),
                ("experts.0.", "experts."),
                (".experts.base_layer", ".experts"),
                (".experts.lora", ".experts.base_layer.lora"),
                ("mlp", "block_sparse_moe"),
                ("block_sparse_moe", "mlp"),
                ("shared_expert.", "shared_experts."),
                ("mlp.gate.", "mlp.shared_expert_gate."),
                ("self_attn", "attn"),
                ("down_proj", "down"),
                (".weight", ""),
                (".weight", ".bias"),
                ("lora_A", "lora_a"),
                ("lora_B", "lora_C"),
                ("lora_", "lora_embedding_"),
                ("lora_A.weight", "lora_magnitude_vector"),
                ("lora_A", "lora_B"),
                ("model.layers", "model.model.layers"),
                ("base_model.model.", "base_model."),
            )
        )
    )
    return name.replace(old, new, 1) if old in name else f"{name}.other"


def _reshaped(draw: Draw, kind: str, tensor: Array) -> Array:
    match kind:
        case "transpose" | "wrong_out" | "wrong_rank" if tensor.ndim == 1:
            return tensor[:-1]
        case "transpose":
            return np.swapaxes(tensor, -1, -2)
        case "wrong_in":
            return np.concatenate([tensor, tensor[..., :1]], axis=-1)
        case "wrong_out" | "wrong_rank":
            return tensor[..., :-1, :]
        case "flatten":
            return tensor.reshape(draw(st.sampled_from(((-1,), (1, *tensor.shape), (math.prod(tensor.shape), 1)))))
        case "not_finite":
            broken = tensor.copy()
            broken.flat[draw(st.integers(0, tensor.size - 1))] = draw(st.sampled_from((np.nan, np.inf, -np.inf)))
            return broken
        case "other_dtype":
            kinds = (np.float64, np.int32, np.int8, np.float16, np.float32)
            return tensor.astype(draw(st.sampled_from(kinds)))
    raise AssertionError(kind)
