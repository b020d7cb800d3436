"""What a PEFT configuration means, by table."""

import math
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.rules import LoraRules, rules_of

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"
MANY = {f"model.layers.{layer}.self_attn.q_proj": 3 for layer in range(2049)}


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
        ({"r": 8.0, "rank_pattern": {"v_proj": 4.0}}, Q0, 8, 2.0),
        ({"rank_pattern": {"q_proj": 4.0}}, Q0, 4, 4.0),
        ({"r": None, "lora_alpha": None, "use_rslora": None}, Q0, 8, 1.0),
        ({"rank_pattern": None, "alpha_pattern": None, "bias": None}, Q0, 8, 2.0),
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
        ({"target_modules": "All-Linear"}, EXPERT, EXPERT),
        ({"target_modules": "all-linear"}, "lm_head", None),
        ({"target_modules": "all-linear"}, "model.embed_tokens", None),
        ({"target_modules": ["lm_head"]}, "lm_head", "lm_head"),
        ({"target_modules": None}, Q0, Q0),
        ({"target_modules": None, "exclude_modules": ["q_proj"]}, Q0, None),
        ({"target_modules": None, "layers_to_transform": [1]}, Q0, None),
        ({"target_modules": []}, Q0, None),
        ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, Q0, None),
        ({"exclude_modules": r".*\.0\..*"}, Q0, None),
        ({"exclude_modules": r".*\.0\..*"}, Q1, Q1),
        ({"layers_to_transform": 1}, Q0, None),
        ({"layers_to_transform": [1]}, Q1, Q1),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, Q0, Q0),
        ({"layers_to_transform": [0], "layers_pattern": ["h", "layers"]}, Q1, None),
        ({"layers_to_transform": [1], "target_modules": ["up_proj"]}, EXPERT, EXPERT),
        ({"layers_to_transform": [3], "target_modules": ["up_proj"]}, EXPERT, EXPERT),
        ({"layers_to_transform": [2], "target_modules": ["up_proj"]}, EXPERT, None),
        ({"layers_to_transform": 3, "layers_pattern": "experts", "target_modules": ["up_proj"]}, EXPERT, EXPERT),
        ({"layers_to_transform": [1.0]}, Q1, Q1),
        ({"layers_to_transform": [], "layers_pattern": []}, Q0, Q0),
        ({"target_modules": None, "target_parameters": ["gate.weight"]}, Q0, None),
        ({"target_parameters": ["mlp.gate.weight"]}, "m.0.mlp.gate", "m.0.mlp.gate.weight"),
        ({"target_parameters": ["gate.weight"], "target_modules": "all-linear"}, "m.mlp.gate", "m.mlp.gate.weight"),
    ],
)
def test_targets_are_those_of_peft(config: dict[str, Any], module: str, target: str | None) -> None:
    assert rules(**config).target_key(module) == target


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"peft_type": "IA3"}, ["peft_type", "IA3", "LORA"]),
        ({"peft_type": None}, ["peft_type"]),
        ({"use_dora": True, "lora_bias": True}, ["lora_bias", "use_dora"]),
        ({"bias": "all"}, ["bias", "'all'", "'none'"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"trainable_token_indices": {"embed_tokens": ["a"]}}, ["trainable_token_indices"]),
        ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens"]),
        ({"use_qalora": True}, ["use_qalora"]),
        ({"use_bdlora": {"nblocks": 2}}, ["use_bdlora"]),
        ({"megatron_config": {"a": 1}}, ["megatron_config"]),
        ({"arrow_config": {"top_k": 1}}, ["arrow_config"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights", "pissa_niter_4"]),
        ({"init_lora_weights": "olora"}, ["init_lora_weights", "olora"]),
        ({"a_later_invention": 3}, ["a_later_invention", "does not know"]),
        ({"r": 0}, ["rank r", "found 0"]),
        ({"r": "8"}, [": r: found str; wanted int"]),
        ({"r": 8.5}, [": r: found float; wanted int"]),
        ({"rank_pattern": {"q_proj": "4"}}, [": rank_pattern[...]: found str; wanted int"]),
        ({"target_modules": 3}, [": target_modules: found int; wanted "]),
        ({"r": 10**40}, ["rank r"]),
        ({"lora_alpha": 10**400}, ["lora_alpha"]),
        ({"init_lora_weights": "LoftQ"}, ["init_lora_weights", "LoftQ"]),
        ({"init_lora_weights": 3}, ["init_lora_weights"]),
        ({"medusa_num_heads": 3, "medusa_num_layers": 1}, ["medusa_num_heads", "Medusa"]),
        ({"speculators_config": {"algorithm": "eagle3"}}, ["speculators_config", "speculator"]),
        ({"layers_to_transform": [0], "layers_pattern": "(layers"}, ["(layers", "regular expression"]),
        ({"target_modules": "a{99999999999}"}, ["a{99999999999}", "regular expression"]),
        ({"rank_pattern": {"q_proj": -1}}, ["rank q_proj"]),
        ({"rank_pattern": {"(q_proj": 4}}, ["(q_proj", "found missing ), unterminated subpattern; wanted a regular"]),
        ({"target_modules": "(q_proj"}, ["(q_proj", "regular expression"]),
        ({"rank_pattern": MANY}, ["rank_pattern and alpha_pattern: found 2049 patterns; wanted at most 2048"]),
        ({"alpha_pattern": MANY}, ["rank_pattern and alpha_pattern: found 2049 patterns; wanted at most 2048"]),
        ({"layers_pattern": list(MANY)}, ["layers_pattern: found 2049 patterns; wanted at most 2048"]),
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
        {"init_lora_weights": "Gaussian"},
        {"init_lora_weights": "EVA", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": "orthogonal"},
        {"modules_to_save": [], "medusa_num_heads": None},
        {"base_model_name_or_path": None},
        {"base_model_name_or_path": {"a": "surprise"}},
        {"init_lora_weights": False},
        {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "revision": "main", "loftq_config": {}},
        {"fan_in_fan_out": True},
    ],
)
def test_what_leaves_the_delta_alone_is_accepted(config: dict[str, Any]) -> None:
    assert rules(**config).scale(Q0) == 2.0


def test_only_what_every_generation_of_peft_would_train_is_missed() -> None:
    config = {"target_modules": ["up_proj"], "layers_to_transform": [1]}
    of_layer_1 = [f"model.layers.1.mlp.experts.{expert}.up_proj" for expert in range(3)]
    assert [rules(**config).surely_targets(module) for module in of_layer_1] == [False, True, False]
    assert not rules(target_modules=None).surely_targets(Q0)
    assert rules().surely_targets(Q0)


def test_long_lists_of_names_cost_a_question_nothing() -> None:
    """A search through all of them for each module would outlast the test's limit."""
    asked = rules(target_modules=[f"m{i}.q_proj" for i in range(200_000)] + ["q_proj"])
    assert all(asked.target_key(f"model.layers.{i}.self_attn.q_proj") for i in range(10_000))


ENDLESS = "(([a-z0-9._])+)+!"


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ENDLESS},
        {"exclude_modules": ENDLESS},
        {"rank_pattern": {"k_proj": 2, ENDLESS: 4}},
        {"alpha_pattern": {ENDLESS: 4}},
        {"layers_to_transform": [0], "layers_pattern": ENDLESS},
    ],
)
def test_a_pattern_that_never_ends_is_named(config: dict[str, Any]) -> None:
    asked = rules(**config)
    with pytest.raises(AdapterInvalid) as refused:
        asked.scale(asked.target_key(Q0) or Q0)
    assert ENDLESS in refused.value.message
    assert "a pattern that ends" in refused.value.message


def test_a_timer_of_ours_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(AdapterInvalid):
        rules(target_modules=ENDLESS).target_key(Q0)
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_off_the_main_thread_patterns_are_held_without_a_timer() -> None:
    asked = rules(rank_pattern={r"layers\.[01]\..*": 2})
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(asked.rank, Q0).result() == 2


def test_many_questions_do_not_use_up_the_time_of_one() -> None:
    asked = rules(rank_pattern={f"layers.{layer}.self_attn.q_proj": 3 for layer in range(300)})
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(300)]
    assert {asked.rank(name) for name in names * 3} == {3}


def test_as_many_patterns_as_there_may_be_are_held_against_as_many_modules() -> None:
    names = list(MANY)[:2048]
    asked = rules(rank_pattern=dict.fromkeys(names, 3), alpha_pattern=dict.fromkeys(names, 6))
    assert {asked.terms(name) for name in names[-700:]} == {(3, 2.0)}
