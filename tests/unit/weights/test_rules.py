"""What a PEFT configuration means, by table."""

import math
from typing import Any

import pytest

from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.rules import LoraRules, rules_of

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


def rules(**config: Any) -> LoraRules:
    return rules_of({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]} | config)


@pytest.mark.parametrize(
    ("config", "module", "rank", "scale"),
    [
        ({}, Q0, 8, 2.0),
        ({"use_rslora": True}, Q0, 8, 16 / math.sqrt(8)),
        ({"rank_pattern": {"q_proj": 4}}, Q0, 4, 4.0),
        ({"alpha_pattern": {"q_proj": 4}}, Q0, 8, 0.5),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, Q0, 8, 2.0),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, Q1, 2, 8.0),
        ({"rank_pattern": {r"layers\.[01]\.self_attn\..*": 2}, "use_rslora": True}, Q0, 2, 16 / math.sqrt(2)),
        ({"rank_pattern": {f"^{Q0}": 32}}, Q0, 32, 0.5),
        ({"rank_pattern": {"proj": 2}}, Q0, 8, 2.0),
        ({"rank_pattern": {"v_proj|q_proj": 2}}, Q0, 2, 8.0),
        ({"rank_pattern": {"q_proj": 2, "layers.0.self_attn.q_proj": 4}}, Q0, 2, 8.0),
        ({"rank_pattern": {r"experts\.3\..*": 2}}, EXPERT, 2, 8.0),
        ({"lora_alpha": 0.5}, Q0, 8, 0.0625),
    ],
)
def test_rank_and_scale_follow_patterns(config: dict[str, Any], module: str, rank: int, scale: float) -> None:
    assert rules(**config).rank(module) == rank
    assert rules(**config).scale(module) == pytest.approx(scale, rel=1e-15)


@pytest.mark.parametrize(
    ("config", "module", "target"),
    [
        ({}, Q0, Q0),
        ({}, "model.layers.0.self_attn.k_proj", None),
        ({"target_modules": ["proj"]}, Q0, None),
        ({"target_modules": [Q1]}, Q0, None),
        ({"target_modules": r".*layers\.1\..*q_proj"}, Q1, Q1),
        ({"target_modules": r".*layers\.1\..*q_proj"}, Q0, None),
        ({"target_modules": r"q_proj"}, Q0, None),
        ({"target_modules": "all-linear"}, Q0, Q0),
        ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, Q0, None),
        ({"exclude_modules": r".*\.0\..*"}, Q0, None),
        ({"exclude_modules": r".*\.0\..*"}, Q1, Q1),
        ({"layers_to_transform": 1}, Q0, None),
        ({"layers_to_transform": [1]}, Q1, Q1),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, Q0, Q0),
        ({"layers_to_transform": [0], "layers_pattern": ["h", "layers"]}, Q1, None),
        ({"layers_to_transform": [1], "target_modules": ["up_proj"]}, EXPERT, EXPERT),
        ({"layers_to_transform": [], "layers_pattern": []}, Q0, Q0),
        ({"target_modules": None, "target_parameters": ["gate.weight"]}, Q0, None),
        ({"target_parameters": ["mlp.gate.weight"]}, "m.0.mlp.gate", "m.0.mlp.gate.weight"),
    ],
)
def test_targets_are_those_of_peft(config: dict[str, Any], module: str, target: str | None) -> None:
    assert rules(**config).target_key(module) == target


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"peft_type": "IA3"}, ["peft_type", "IA3", "LORA"]),
        ({"peft_type": None}, ["peft_type"]),
        ({"use_dora": True}, ["use_dora", "DoRA"]),
        ({"bias": "all"}, ["bias", "'all'", "'none'"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"trainable_token_indices": [1]}, ["trainable_token_indices"]),
        ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens"]),
        ({"use_qalora": True}, ["use_qalora"]),
        ({"use_bdlora": {"nblocks": 2}}, ["use_bdlora"]),
        ({"megatron_config": {"a": 1}}, ["megatron_config"]),
        ({"arrow_config": {"top_k": 1}}, ["arrow_config"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights", "pissa_niter_4"]),
        ({"init_lora_weights": "olora"}, ["init_lora_weights", "olora"]),
        ({"a_later_invention": 3}, ["a_later_invention", "does not know"]),
        ({"r": 0}, ["rank r", "found 0"]),
        ({"r": "8"}, ["r"]),
        ({"rank_pattern": {"q_proj": -1}}, ["rank q_proj"]),
        ({"rank_pattern": {"(q_proj": 4}}, ["(q_proj", "regular expression"]),
        ({"target_modules": "(q_proj"}, ["(q_proj", "regular expression"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_key(config: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(AdapterInvalid) as refused:
        rules(**config)
    for name in ["adapter_config.json", *names]:
        assert name in refused.value.message


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": False, "modules_to_save": None, "layer_replication": None, "a_later_invention": None},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "revision": "main", "loftq_config": {}},
        {"fan_in_fan_out": True},
    ],
)
def test_what_leaves_the_delta_alone_is_accepted(config: dict[str, Any]) -> None:
    assert rules(**config).scale(Q0) == 2.0
