"""Reading config.json and the checkpoint: both spellings, and every refusal by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from infinilora.engine.model.checkpoint import Checkpoint
from infinilora.engine.model.names import tensor_shapes
from infinilora.engine.model.rope import read_rope
from infinilora.engine.model.spec import ModelSpec, read_spec, spec_from_config
from infinilora.protocol.errors import InvalidRequest
from support.tiny_models import CONFIGS, TinyModel

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
}
QWEN2_MOE = {
    **LLAMA,
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def spec(**changes: Any) -> ModelSpec:
    return spec_from_config({**LLAMA, **changes})


def test_the_spellings_of_transformers_4_and_5_mean_the_same() -> None:
    old = spec()
    new = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "torch_dtype")}
    new |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "dtype": "bfloat16"}
    assert spec_from_config(new) == old
    assert old.rope.inv_freq[1] == pytest.approx(5000.0 ** (-2 / 8))
    assert (
        spec_from_config({**QWEN2_MOE, "model_type": "qwen3_moe", "num_experts": None, "num_local_experts": 4}).moe
        == spec_from_config({**QWEN2_MOE, "model_type": "qwen3_moe"}).moe
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, mistral"),
        ({"model_type": None}, "model_type ''"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "4 heads over 3 KV heads"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({**QWEN2_MOE, "num_experts_per_tok": 5}, "5 of 4 experts"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        spec(**changes)


def test_a_window_bounds_the_exact_length() -> None:
    assert spec(model_type="mistral", sliding_window=64).max_exact_len == 64
    assert spec(model_type="qwen2", sliding_window=64, use_sliding_window=False).max_exact_len == 256
    assert spec(model_type="qwen2", sliding_window=64, use_sliding_window=True).max_exact_len == 64


def test_expert_layers_follow_step_and_exceptions() -> None:
    every_second = spec_from_config({**QWEN2_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2})
    assert every_second.moe_layers == (False, True, False, True)
    excepted = spec_from_config({**QWEN2_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]})
    assert excepted.moe_layers == (True, False, True)


@pytest.mark.parametrize("kind", ["llama3", "yarn", "yarn-mscale"])
def test_rope_scalings_equal_transformers(kind: str) -> None:
    rules: dict[str, Any] = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512}
    if kind == "llama3":
        rules |= {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    elif kind == "yarn":
        rules |= {"rope_type": "yarn", "beta_fast": 16}
    else:
        rules |= {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.9}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rules
    )
    hf = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    ours = read_rope(config.to_dict(), head_dim=64, max_position=4096, source="test")
    torch.testing.assert_close(torch.tensor(ours.inv_freq), hf.inv_freq, rtol=1e-5, atol=1e-9)
    assert ours.magnitude == pytest.approx(hf.attention_scaling)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_table_of_tensors_is_what_transformers_writes(name: str, tiny: Callable[[str], TinyModel]) -> None:
    directory = tiny(name).directory
    written = {k: tuple(v.shape) for k, v in load_file(directory / "model.safetensors").items()}
    assert tensor_shapes(read_spec(directory)) == written


def broken(tiny: Callable[[str], TinyModel], target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    source = tiny("llama").directory
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), r"k_proj.weight \[16, 32\] is missing"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"norm.weight is \[31\]; wanted \[32\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32).int()}), "norm.weight is I32"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}), "q_proj.bias is not part of"),
    ],
    ids=["missing", "misshapen", "integers", "unused"],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    tiny: Callable[[str], TinyModel], tmp_path: Path, change: Any, words: str
) -> None:
    directory = broken(tiny, tmp_path, change)
    with pytest.raises(InvalidRequest, match=words):
        Checkpoint(directory, read_spec(directory))


def test_directories_that_hold_no_model_say_what_is_missing(tmp_path: Path, tiny: Callable[[str], TinyModel]) -> None:
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequest, match="not JSON"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_bytes((tiny("llama").directory / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidRequest, match="only safetensors"):
        Checkpoint(tmp_path, read_spec(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{damaged}")
    with pytest.raises(InvalidRequest, match="damaged safetensors file"):
        Checkpoint(tmp_path, read_spec(tmp_path))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequest, match="named in the index and is missing"):
        Checkpoint(tmp_path, read_spec(tmp_path))


def test_generation_config_adds_ends_of_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read_spec(tmp_path).eos_token_ids == (7, 2)
