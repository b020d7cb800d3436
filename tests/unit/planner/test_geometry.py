"""Sizes of adapters against the engine's own table of sites, and against published figures."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infinilora.engine.model.names import site_geometry
from infinilora.engine.model.spec import ModelSpec, spec_from_config
from infinilora.planner.geometry import TARGETS, Config, find_base, known_models, layers_of
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import InvalidRequest

ALL = frozenset(TARGETS)
SITES = {
    "attention": (Site.QKV, Site.O),
    "mlp": (Site.GATE_UP, Site.DOWN),
    "experts": (Site.MOE_GATE_UP, Site.MOE_DOWN),
    "shared": (Site.SHARED_GATE_UP, Site.SHARED_DOWN),
}
READ_BY_THE_ENGINE = {"vocab_size": 1000, "max_position_embeddings": 4096, "rope_theta": 10000.0}
SPARSE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}


def with_engine_keys(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(config | READ_BY_THE_ENGINE)


def configs() -> dict[str, dict[str, Any]]:
    known = {one.name: msgspec.to_builtins(one.config) for one in known_models()}
    return {**known, "sparse": SPARSE}


@pytest.mark.parametrize("name", [*(one.name for one in known_models()), "sparse"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_site_has_the_engines_sizes(name: str, target: str) -> None:
    """Numbers of A [r, in] and B [out, r] for each part and expert; rows as the link carries them."""
    config = configs()[name]
    spec = with_engine_keys(config)
    want: dict[int, list[tuple[int, int, int]]] = {}
    for site in site_geometry(spec):
        if site.site in SITES[target]:
            copies, top_k = site.num_experts or 1, spec.moe.top_k if site.num_experts and spec.moe else 1
            numbers = copies * sum(site.in_dim + part.out_dim for part in site.parts)
            is_down = site.site == Site.MOE_DOWN
            sent = site.in_dim * (top_k if is_down else 1)
            returned = site.out_dim * (1 if is_down else top_k)
            want.setdefault(site.layer, []).append((sent, returned, numbers))
    if not want:
        with pytest.raises(InvalidRequest, match="wanted something that"):
            layers_of(msgspec.convert(config, Config), frozenset({target}), name)
        return
    layers = layers_of(msgspec.convert(config, Config), frozenset({target}), name)
    assert len(layers) == spec.num_layers
    for layer, sites in enumerate(layers):
        assert [(site.sent, site.returned, site.numbers) for site in sites] == want.get(layer, [])


@pytest.mark.parametrize(
    ("model", "rank", "gib"), [("qwen3-30b-a3b", 64, 6.1875), ("qwen3-30b-a3b", 32, 3.09), ("mixtral-8x7b", 64, 1.69)]
)
def test_published_sizes_come_out(model: str, rank: int, gib: float) -> None:
    """Routed experts only, 16 bits."""
    base = find_base(model, frozenset({"experts"}))
    assert base.adapter_bytes(rank, 2) / 2**30 == pytest.approx(gib, abs=0.006)


def test_a_directory_is_read_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SPARSE | {"torch_dtype": "bfloat16"}))
    assert find_base(str(tmp_path), ALL).layers == layers_of(msgspec.convert(SPARSE, Config), ALL, "sparse")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gpt2"}, "model_type: found 'gpt2'; wanted one of llama, mistral"),
        ({"hidden_size": 0}, "hidden_size: found 0; wanted 1 or more"),
        ({"hidden_size": "64"}, "Expected `int`, got `str` - at `$.hidden_size`"),
        ({"num_experts": None}, "num_experts: found 0; wanted 1 or more"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok: found None; wanted 1 or more"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: found 7; wanted 6 at most"),
        ({"num_key_value_heads": -1}, "num_key_value_heads: found -1; wanted 1 or more"),
        ({"decoder_sparse_step": -2}, "decoder_sparse_step: found -2; wanted 1 or more"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SPARSE | change))
    with pytest.raises(InvalidRequest) as caught:
        find_base(str(tmp_path), ALL)
    assert caught.value.message.startswith(f"{path}: ")
    assert told in caught.value.message


def test_known_names_are_told_to_whom_misses_one() -> None:
    with pytest.raises(InvalidRequest, match=r"found 'qwen9'; wanted one of smollm2-135m, .*or a directory"):
        find_base("qwen9", ALL)
