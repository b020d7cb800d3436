"""Adapters as trainers outside PEFT write them: MLX's own layout, and PEFT's with configs of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinilora.protocol.errors import AdapterInvalid, SourceNotFound
from infinilora.weights.check import plan_adapter
from infinilora.weights.exports import MLX_TENSORS_FILE
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.synth import write_peft_adapter
from infinilora.weights.tensorfile import Array
from support.cards import make_card, tiny_cards
from support.deltas import ingested_deltas, largest_difference, write_source

CARD = tiny_cards()["llama"]
RANK, SCALE = 4, 20.0
CONFIG: dict[str, Any] = {
    "fine_tune_type": "lora",
    "model": "somewhere/tiny-llama-4bit",
    "num_layers": 1,
    "iters": 600,
    "learning_rate": 1e-5,
    "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0},
}
WIDTHS = {"model.layers.1.self_attn.q_proj": (32, 32), "model.layers.1.mlp.down_proj": (48, 32)}


def tensors() -> dict[str, Array]:
    dice = np.random.default_rng(2)
    found = {}
    for module, (in_dim, out_dim) in WIDTHS.items():
        found[f"{module}.lora_a"] = dice.standard_normal((in_dim, RANK), np.float32)
        found[f"{module}.lora_b"] = dice.standard_normal((RANK, out_dim), np.float32)
    return found


def source(directory: Path, weights: dict[str, Array] | None = None, **config: Any) -> Path:
    return write_source(directory, CONFIG | config, weights or tensors(), MLX_TENSORS_FILE)


def test_the_delta_is_scale_times_the_transposed_product(tmp_path: Path) -> None:
    adapter, weights = source(tmp_path / "a"), tensors()
    wanted = {
        module: SCALE * (weights[f"{module}.lora_a"].astype(np.float64) @ weights[f"{module}.lora_b"]).T
        for module in WIDTHS
    }
    found = ingested_deltas(adapter, CARD, tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-14
    assert read_adapter(adapter).declared_base == "somewhere/tiny-llama-4bit"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"fine_tune_type": "dora"}, ["fine_tune_type", "dora", "no magnitude"]),
        ({"fine_tune_type": "full"}, ["fine_tune_type", "full"]),
        ({"use_dora": True}, ["use_dora"]),
        ({"lora_parameters": {"rank": 4}}, ["lora_parameters", "scale"]),
        ({"lora_parameters": {"rank": 4, "scale": 1.0, "alpha": 16}}, ["lora_parameters", "alpha"]),
        ({"lora_parameters": {"rank": 0, "scale": 1.0}}, ["rank r"]),
        ({"lora_parameters": [4, 1.0]}, ["lora_parameters"]),
        ({"lora_parameters": {"rank": 8, "scale": 1.0}}, ["[48, 4]", "[48, 8]"]),
    ],
)
def test_what_mlx_means_otherwise_is_refused(tmp_path: Path, config: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(AdapterInvalid) as refused:
        plan_adapter(read_adapter(source(tmp_path / "a", **config)), CARD)
    for name in names:
        assert name in refused.value.message


@pytest.mark.parametrize("name", ["switch_mlp.up_proj", "experts.up_proj"])
def test_mlxs_experts_are_refused_by_name(tmp_path: Path, name: str) -> None:
    module, card = f"model.layers.0.mlp.{name}", tiny_cards()["qwen3_moe"]
    planes = {
        f"{module}.lora_a": np.ones((4, 32, RANK), np.float32),
        f"{module}.lora_b": np.ones((4, RANK, 24), np.float32),
    }
    with pytest.raises(AdapterInvalid, match=name):
        plan_adapter(read_adapter(source(tmp_path / "a", planes)), card)


def test_mlxs_embedding_is_refused_for_its_tied_head(tmp_path: Path) -> None:
    table = {
        "model.embed_tokens.lora_a": np.ones((128, RANK), np.float32),
        "model.embed_tokens.lora_b": np.ones((RANK, 32), np.float32),
    }
    with pytest.raises(AdapterInvalid, match=r"embed_tokens.lora_a: found .* tied head"):
        plan_adapter(read_adapter(source(tmp_path / "a", table)), make_card("llama", outer=True))


def test_mlx_names_under_a_peft_config_are_not_guessed_at(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    adapter = write_source(tmp_path / "a", config, tensors())
    with pytest.raises(AdapterInvalid, match=r"lora_a: found a name of MLX under a configuration of PEFT"):
        plan_adapter(read_adapter(adapter), CARD)


def test_peft_names_under_an_mlx_config_are_not_guessed_at(tmp_path: Path) -> None:
    weights = {
        name.replace(".lora_a", ".lora_A.weight").replace(".lora_b", ".lora_B.weight"): value
        for name, value in tensors().items()
    }
    with pytest.raises(AdapterInvalid, match=r"wanted \.\.\.lora_a or \.\.\.lora_b"):
        plan_adapter(read_adapter(source(tmp_path / "a", weights)), CARD)


def test_the_weight_file_of_the_other_kind_is_not_taken(tmp_path: Path) -> None:
    adapter = write_source(tmp_path / "a", CONFIG, tensors(), TENSORS_FILE)
    with pytest.raises(SourceNotFound, match=MLX_TENSORS_FILE):
        read_adapter(adapter)


# The shapes of configs that trainers write beside PEFT's own files.
TRAINERS: dict[str, dict[str, Any]] = {
    "unsloth": {
        "auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True},
        "target_modules": r"(?:.*?(?:language|text).*?(?:attn|mlp).*?(?:q_proj|down_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:q_proj|down_proj))",
        "bias": "none",
        "lora_dropout": 0,
        "use_rslora": False,
        "loftq_config": {},
    },
    "llama_factory": {
        "target_modules": ["down_proj", "q_proj"],
        "modules_to_save": None,
        "layers_to_transform": None,
        "layer_replication": None,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "inference_mode": True,
    },
    "axolotl": {
        "base_model_name_or_path": "/workspace/out/merged",
        "target_modules": ["q_proj", "down_proj"],
        "fan_in_fan_out": None,
        "lora_dropout": 0.05,
        "exclude_modules": None,
        "trainable_token_indices": None,
        "corda_config": None,
    },
    "torchtune": {"target_modules": ["q_proj", "down_proj"], "task_type": None},
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainers_peft_files_mean_what_pefts_own_mean(tmp_path: Path, trainer: str) -> None:
    targets = ["q_proj", "down_proj"]
    plain = write_peft_adapter(tmp_path / "plain", CARD, rank=4, targets=targets, seed=8)
    config = TRAINERS[trainer]
    other = write_peft_adapter(tmp_path / trainer, CARD, rank=4, targets=targets, seed=8, config=config)
    wanted = ingested_deltas(plain, CARD, tmp_path / "out")
    found = ingested_deltas(other, CARD, tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) == 0


@pytest.mark.parametrize("name", ["adapter_0.pt", "adapter_model.bin", "lora_weights.ckpt"])
def test_a_trainers_own_checkpoint_is_refused_by_name(tmp_path: Path, name: str) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4)
    (source / TENSORS_FILE).rename(source / name)
    with pytest.raises(AdapterInvalid, match=rf"{name}: file format: found a pickle file"):
        read_adapter(source)
