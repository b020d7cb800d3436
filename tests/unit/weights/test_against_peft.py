"""Files that PEFT itself writes, for every family: the packed deltas are those PEFT adds to the weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors.numpy import load_file, save_file

from infinilora.protocol.adapter import BaseCard
from infinilora.weights.synth import write_peft_adapter
from support.cards import make_card
from support.deltas import Deltas, ingested_deltas, largest_difference, rename_tensors

FF, EXPERTS, SHARED = 24, 4, 40
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "intermediate_size": FF,
    "moe_intermediate_size": FF,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS},
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": SHARED},
    "olmoe": {"num_experts": EXPERTS},
}
DENSE = ["llama", "mistral", "qwen2", "qwen3"]
MOE = ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]


def base_model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def card_of(family: str) -> BaseCard:
    experts = EXPERTS if family in MOE else 0
    shared = SHARED if family == "qwen2_moe" else 0
    return make_card(family, intermediate=FF, num_experts=experts, shared_intermediate=shared)


def save(family: str, directory: Path, **config: Any) -> Deltas:
    """Write a random adapter with PEFT; return what PEFT adds to each projection."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base_model(family), LoraConfig(init_lora_weights=False, **config))
        model.save_pretrained(directory)
    return deltas_of(model)


def deltas_of(model: PeftModel) -> Deltas:
    deltas = Deltas()
    for name, layer in model.base_model.model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        module = name.replace(".base_layer", "")
        delta = layer.get_delta_weight("default").detach().double().numpy()
        if not isinstance(layer, ParamWrapper) or layer.parameter_name == "weight":
            deltas[module] = delta
        else:
            deltas |= fused_deltas(module, layer.parameter_name, delta)
    return deltas


def fused_deltas(module: str, parameter: str, delta: Any) -> Deltas:
    parts = {"gate_proj": slice(0, FF), "up_proj": slice(FF, 2 * FF)}
    if parameter == "down_proj":
        parts = {"down_proj": slice(None)}
    return {
        f"{module}.{expert}.{part}": delta[expert, rows] for expert in range(len(delta)) for part, rows in parts.items()
    }


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        {"r": 6, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
        {
            "r": 4,
            "target_modules": r".*\.(v_proj|up_proj)",
            "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\..*": 7},
            "alpha_pattern": {r"^model.layers.0.mlp.up_proj": 3},
        },
        {
            "r": 3,
            "target_modules": ATTENTION,
            "exclude_modules": ["k_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
        },
    ],
    ids=["all", "rslora", "patterns", "layers"],
)
def test_dense_adapters_equal_peft(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    wanted = save(family, tmp_path, **config)
    found = ingested_deltas(tmp_path, card_of(family), tmp_path / "packed")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-6


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "target_parameters": EXPERT_PARAMETERS},
        {"r": 3, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
        {
            "r": 3,
            "target_modules": [],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 5, r"layers\.1\.mlp\.experts\.gate_up_proj": 2},
            "alpha_pattern": {"experts.gate_up_proj": 11},
            "use_rslora": True,
        },
    ],
    ids=["all", "down", "patterns"],
)
def test_fused_expert_adapters_equal_peft(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    wanted = save(family, tmp_path, **config)
    found = ingested_deltas(tmp_path, card_of(family), tmp_path / "packed")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-6


@pytest.mark.parametrize("family", MOE)
def test_adapters_that_peft_converted_to_fused_experts_equal_peft(tmp_path: Path, family: str) -> None:
    experts = ["w1", "w2", "w3"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    router = [] if family == "qwen2_moe" else ["gate"]
    wanted = save(family, tmp_path, r=4, lora_alpha=6, target_modules=["q_proj", *router, *experts])
    found = ingested_deltas(tmp_path, card_of(family), tmp_path / "packed")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-6


EARLIER_MIXTRAL = {".gate_proj": ".w1", ".up_proj": ".w3", ".down_proj": ".w2", ".mlp.": ".block_sparse_moe."}


@pytest.mark.parametrize(
    ("family", "names", "targets"),
    [
        ("qwen3_moe", {}, ["gate_proj", "up_proj", "down_proj", "gate", "q_proj"]),
        ("mixtral", EARLIER_MIXTRAL, ["w1", "w2", "w3", "gate", "q_proj"]),
    ],
)
def test_per_expert_files_equal_peft_which_fuses_them_as_it_loads(
    tmp_path: Path, family: str, names: dict[str, str], targets: list[str]
) -> None:
    card = card_of(family)
    projections = ["gate_proj", "up_proj", "down_proj", "gate", "q_proj"]
    write_peft_adapter(tmp_path, card, rank=4, seed=3, targets=projections, config={"target_modules": targets})
    rename_tensors(tmp_path, names)
    found = ingested_deltas(tmp_path, card, tmp_path / "packed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(base_model(family), str(tmp_path))
    wanted = deltas_of(model)
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-6


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_peft_loads_what_synth_writes(tmp_path: Path, family: str, dtype: str) -> None:
    card = card_of(family)
    write_peft_adapter(tmp_path, card, rank=4, seed=2, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*adapter keys.*")
        model = PeftModel.from_pretrained(base_model(family), str(tmp_path))
    found = ingested_deltas(tmp_path, card, tmp_path / "packed")
    wanted = deltas_of(model)
    assert found.keys() == wanted.keys()
    assert np.abs(wanted["model.layers.1.mlp.down_proj"]).max() > 0.01
    assert largest_difference(found, wanted) < 1e-6


def load(family: str, directory: Path) -> Deltas:
    """What PEFT adds with these files; a key that it would drop fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*adapter keys.*")
        return deltas_of(PeftModel.from_pretrained(base_model(family), str(directory)))


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": None},
        {"lora_alpha": 3.5, "use_rslora": True, "init_lora_weights": "eva"},
        {"rank_pattern": {r"layers\.1\..*": 4, "q_proj": 9}, "alpha_pattern": {"v_proj": 1, "self_attn.v_proj": 5}},
        {"layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"], "fan_in_fan_out": True},
        {"target_modules": r".*self_attn\.(q|v)_proj", "layers_to_transform": None, "bias": "none"},
    ],
    ids=["absent", "rslora", "patterns", "layers", "regex"],
)
def test_configs_mean_what_peft_reads_in_them(tmp_path: Path, config: dict[str, Any]) -> None:
    card = card_of("llama")
    write_peft_adapter(tmp_path, card, rank=9, seed=4, targets=["q_proj", "v_proj"])
    keep_ranks(tmp_path, config.get("rank_pattern") or {})
    write_config(tmp_path, config)
    wanted = load("llama", tmp_path)
    found = ingested_deltas(tmp_path, card, tmp_path / "packed")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-6


def write_config(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def keep_ranks(directory: Path, ranks: dict[str, int]) -> None:
    """Cut the tensors of layer 1 to the rank that the first pattern gives it."""
    if not ranks:
        return
    path, rank = directory / "adapter_model.safetensors", next(iter(ranks.values()))
    tensors = load_file(path)
    for name in tensors:
        if "layers.1." in name:
            tensors[name] = np.ascontiguousarray(tensors[name][:rank] if "lora_A" in name else tensors[name][:, :rank])
    save_file(tensors, path)


def test_an_adapters_name_in_the_keys_is_dropped_as_peft_does(tmp_path: Path) -> None:
    card = card_of("llama")
    write_peft_adapter(tmp_path, card, rank=4, seed=4, targets=["q_proj", "v_proj"])
    rename_tensors(tmp_path, {".weight": ".default.weight"})
    assert largest_difference(ingested_deltas(tmp_path, card, tmp_path / "packed"), load("llama", tmp_path)) < 1e-6
