"""The oracle is judged too: where PEFT 0.21.2 reads a file faithfully, the explicit merge says what PEFT computes."""

import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, assume, given, settings
from peft import PeftModel
from peft.tuners.lora.layer import Embedding, LoraLayer, ParamWrapper

from infinilora.protocol.adapter import BaseCard, Site
from support.explicit_merge import Deltas, disagreement, explicit_deltas
from support.random_adapters import Adapter, adapters
from support.random_configs import EARLY_VERSIONS

_MEANINGFUL = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "peft_version",
    "lora_bias",
}  # fmt: skip
FLOAT32 = 1e-4
"""PEFT multiplies in float32, and the largest sums here have 64 terms."""


def llama(card: BaseCard) -> Any:
    """A random transformers model of the card's sizes."""
    config = transformers.LlamaConfig(**_sizes(card), intermediate_size=card.geometry()[0, Site.DOWN].in_dim)
    return transformers.LlamaForCausalLM(config)


def qwen3_moe(card: BaseCard) -> Any:
    down = card.geometry()[0, Site.MOE_DOWN]
    config = transformers.Qwen3MoeConfig(
        **_sizes(card), moe_intermediate_size=down.in_dim, num_experts=down.num_experts, num_experts_per_tok=1
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _sizes(card: BaseCard) -> dict[str, Any]:
    query, key, _ = card.geometry()[0, Site.QKV].parts
    head_dim = 4 if card.hidden_dim == 8 else 8
    return {
        "vocab_size": card.vocab_size,
        "hidden_size": card.hidden_dim,
        "num_hidden_layers": card.num_layers,
        "num_attention_heads": query.out_dim // head_dim,
        "num_key_value_heads": key.out_dim // head_dim,
        "head_dim": head_dim,
    }


def peft_deltas(model: Any, directory: Path) -> Deltas:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of what it leaves out; its numbers are what counts
        loaded = PeftModel.from_pretrained(model, directory)
    return {
        module: delta
        for name, layer in loaded.base_model.model.named_modules()
        if isinstance(layer, LoraLayer)
        for module, delta in _by_module(name, layer)
    }


def _by_module(name: str, layer: Any) -> Iterator[tuple[str, Any]]:
    delta = layer.get_delta_weight("default").detach().double().numpy()
    if isinstance(layer, Embedding):
        yield name, delta.T
        return
    if not isinstance(layer, ParamWrapper) or delta.ndim == 2:
        yield name, delta
        if not isinstance(layer, ParamWrapper) and (bias := layer.lora_B["default"].bias) is not None:
            yield f"{name}.bias", layer.scaling["default"] * bias.detach().double().numpy()
        return
    experts = name.removesuffix(".base_layer")
    for expert, matrix in enumerate(delta):
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[layer.parameter_name]
        for part, rows in zip(parts, np.split(matrix, len(parts)), strict=True):
            yield f"{experts}.{expert}.{part}", rows


def has_names_of_peft(adapter: Adapter) -> bool:
    """Other names in a file PEFT drops without an error."""
    form = re.compile(r"base_model\.model\.model\..+\.lora_(embedding_[AB]|([AB](\.default)?\.(weight|bias)))")
    return all(form.fullmatch(name) for name in adapter.tensors)


def check(adapter: Adapter, model: Any) -> None:
    config = {key: value for key, value in adapter.config.items() if key in _MEANINGFUL and value is not None}
    if "r" in config:
        config["r"] = int(config["r"])  # PEFT fails on 8.0
    adapter = replace(adapter, config=config)
    with tempfile.TemporaryDirectory() as name:
        directory = adapter.write(Path(name))
        from_peft = {module: delta for module, delta in peft_deltas(model, directory).items() if delta.any()}
        explicit = explicit_deltas(directory, adapter.card)
    assert not (wrong := disagreement(from_peft, explicit, adapter.card, tolerance=FLOAT32)), wrong


few = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    derandomize=True,
)


@few
@pytest.mark.timeout(120)
@given(adapters(kinds=("llama",), layouts=("plain",)))
def test_the_oracle_reads_plain_adapters_as_peft_does(adapter: Adapter) -> None:
    assume(has_names_of_peft(adapter) and adapter.config.get("target_modules") is not None)  # else PEFT's defaults
    assume(adapter.config.get("peft_version") not in EARLY_VERSIONS)  # which the PEFT of today does not heed
    check(adapter, llama(adapter.card))


@few
@pytest.mark.timeout(120)
@given(adapters(kinds=("qwen3_moe",), layouts=("flat",)))
def test_the_oracle_reads_fused_experts_as_peft_does(adapter: Adapter) -> None:
    # Other targets of this model PEFT translates to transformers' new modules first, not always faithfully.
    assume(has_names_of_peft(adapter) and isinstance(adapter.config.get("target_modules"), list))
    assume(adapter.must_serve)
    check(adapter, qwen3_moe(adapter.card))
