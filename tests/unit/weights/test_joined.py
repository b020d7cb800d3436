"""Adapters of models that had their projections fused, for bases that have them apart."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from infinilora.protocol.adapter import PartGeometry, Site
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.check import plan_adapter
from infinilora.weights.peft import read_adapter
from infinilora.weights.synth import write_peft_adapter
from infinilora.weights.tensorfile import Array
from support.cards import make_card, tiny_cards
from support.deltas import Deltas, ingested_deltas, largest_difference, write_source

HIDDEN, Q, KV, FF, RANK, ALPHA = 32, 32, 16, 48, 4, 6.0
CARD = make_card("llama", num_layers=1)
PREFIX, LAYER = "base_model.model.", "model.layers.0"
ATTENTION, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"


def factors(out_dim: int, *, rank: int = RANK, seed: int = 0) -> tuple[Array, Array]:
    dice = np.random.default_rng(seed)
    return dice.standard_normal((rank, HIDDEN), np.float32), dice.standard_normal((out_dim, rank), np.float32)


def source(directory: Path, pairs: dict[str, tuple[Array, Array]], **config: Any) -> Path:
    targets = sorted({module.rpartition(".")[2] for module in pairs})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    return write_source(directory, settings | config, tensors)


def merged(pair: tuple[Array, Array], *, rank: int = RANK) -> Array:
    delta: Array = ALPHA / rank * (pair[1].astype(np.float64) @ pair[0].astype(np.float64))
    return delta


def split(delta: Array, container: str, widths: dict[str, int]) -> Deltas:
    ends = np.cumsum(list(widths.values()))
    return {f"{container}.{name}": delta[end - widths[name] : end] for name, end in zip(widths, ends, strict=True)}


QKV = {"q_proj": Q, "k_proj": KV, "v_proj": KV}
GATE_UP = {"gate_proj": FF, "up_proj": FF}


def test_a_fused_qkv_and_gate_up_are_cut_at_their_parts(tmp_path: Path) -> None:
    qkv, gate_up = factors(Q + 2 * KV), factors(2 * FF, seed=1)
    adapter = source(tmp_path / "a", {f"{ATTENTION}.qkv_proj": qkv, f"{MLP}.gate_up_proj": gate_up})
    wanted = split(merged(qkv), ATTENTION, QKV) | split(merged(gate_up), MLP, GATE_UP)
    found = ingested_deltas(adapter, CARD, tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-14


def test_a_block_diagonal_b_is_packed_at_its_true_ranks(tmp_path: Path) -> None:
    a, b = factors(Q + 2 * KV, rank=6)
    for part, rows in enumerate((slice(0, Q), slice(Q, Q + KV), slice(Q + KV, None))):
        b[rows, : 2 * part] = 0
        b[rows, 2 * part + 2 :] = 0
    adapter = source(tmp_path / "a", {f"{ATTENTION}.qkv_proj": (a, b)}, r=6)
    plan = plan_adapter(read_adapter(adapter), CARD)
    assert [(part.entry.name, part.entry.rank) for part in plan.sites[0].parts] == [("q", 2), ("k", 2), ("v", 2)]
    wanted = split(merged((a, b), rank=6), ATTENTION, QKV)
    assert largest_difference(ingested_deltas(adapter, CARD, tmp_path / "out"), wanted) < 1e-14


def test_zeros_keep_one_rank_and_add_nothing(tmp_path: Path) -> None:
    a, b = factors(2 * FF)
    b[FF:] = 0
    found = ingested_deltas(source(tmp_path / "a", {f"{MLP}.gate_up_proj": (a, b)}), CARD, tmp_path / "out")
    assert found[f"{MLP}.gate_proj"].any()
    assert not found[f"{MLP}.up_proj"].any()


def test_one_experts_fused_gate_up_is_its_own(tmp_path: Path) -> None:
    card = make_card("qwen3_moe", num_layers=1, num_experts=3, intermediate=FF)
    pair, container = factors(2 * FF), f"{MLP}.experts.2"
    found = ingested_deltas(source(tmp_path / "a", {f"{container}.gate_up_proj": pair}), card, tmp_path / "out")
    wanted = split(merged(pair), container, GATE_UP)
    assert largest_difference(found, wanted) < 1e-14
    assert {module for module, delta in found.items() if delta.any()} == wanted.keys()


def test_a_shared_experts_fused_gate_up_is_its_own(tmp_path: Path) -> None:
    card = make_card("qwen2_moe", num_layers=1, num_experts=3, shared_intermediate=FF)
    pair, container = factors(2 * FF), f"{MLP}.shared_expert"
    found = ingested_deltas(source(tmp_path / "a", {f"{container}.gate_up_proj": pair}), card, tmp_path / "out")
    assert found.keys() == split(merged(pair), container, GATE_UP).keys()
    assert largest_difference(found, split(merged(pair), container, GATE_UP)) < 1e-14


def test_targets_may_name_the_parts_of_a_fused_module(tmp_path: Path) -> None:
    pair = factors(Q + 2 * KV)
    adapter = source(tmp_path / "a", {f"{ATTENTION}.qkv_proj": pair}, target_modules=list(QKV))
    wanted = split(merged(pair), ATTENTION, QKV)
    assert largest_difference(ingested_deltas(adapter, CARD, tmp_path / "out"), wanted) < 1e-14


@pytest.mark.parametrize(
    ("alphas", "scales"),
    [
        ({"q_proj": 8, "k_proj": 8, "v_proj": 8}, (2, 2, 2)),
        ({"k_proj": 1}, (1.5, 0.25, 1.5)),
        ({"q_proj": 2, r"layers\.0\..*v_proj": 20}, (0.5, 1.5, 5)),
        ({"self_attn.*": 2}, (0.5, 0.5, 0.5)),
    ],
)
def test_the_parts_of_a_fused_module_have_their_own_alphas_where_they_are_the_targets(
    tmp_path: Path, alphas: dict[str, float], scales: tuple[float, ...]
) -> None:
    a, b = factors(Q + 2 * KV)
    bias = np.arange(Q + 2 * KV, dtype=np.float32)
    tensors = {f"{PREFIX}{ATTENTION}.qkv_proj.lora_{half}.weight": factor for half, factor in (("A", a), ("B", b))}
    tensors[f"{PREFIX}{ATTENTION}.qkv_proj.lora_B.bias"] = bias
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(QKV), "lora_bias": True}
    adapter = write_source(tmp_path / "a", config | {"alpha_pattern": alphas}, tensors)
    rows = np.repeat(scales, list(QKV.values()))[:, None]
    wanted = split(rows * (b.astype(np.float64) @ a.astype(np.float64)), ATTENTION, QKV)
    assert largest_difference(ingested_deltas(adapter, CARD, tmp_path / "out"), wanted) < 1e-14
    plan = plan_adapter(read_adapter(adapter), CARD)
    kept = [part.bias.read(plan.source.tensors) for part in plan.sites[0].parts if part.bias]
    assert np.allclose(np.concatenate(kept), rows[:, 0] * bias, rtol=1e-6)


def test_a_fused_module_that_is_a_target_itself_has_the_alpha_of_its_own_name(tmp_path: Path) -> None:
    pair = factors(Q + 2 * KV)
    config = {"target_modules": ["qkv_proj", *QKV], "alpha_pattern": {"q_proj": 99}}
    adapter = source(tmp_path / "a", {f"{ATTENTION}.qkv_proj": pair}, **config)
    wanted = split(merged(pair), ATTENTION, QKV)
    assert largest_difference(ingested_deltas(adapter, CARD, tmp_path / "out"), wanted) < 1e-14


def test_stacked_experts_have_the_alphas_of_their_own_names(tmp_path: Path) -> None:
    card = make_card("qwen3_moe", num_layers=1, num_experts=3, intermediate=FF)
    a, b = np.stack([factors(2 * FF, seed=e)[0] for e in range(3)]), factors(2 * FF, seed=9)[1][None]
    tensors = {f"{PREFIX}{MLP}.experts.gate_up_proj.lora_{half}.weight": x for half, x in (("A", a), ("B", b))}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["gate_proj", "up_proj"]}
    alphas = {"experts.1.gate_proj": 2, "up_proj": 3, "experts.2.gate_proj": 10}
    adapter = write_source(tmp_path / "a", config | {"alpha_pattern": alphas}, tensors)
    wanted = Deltas()
    for expert, gate_alpha in enumerate((ALPHA, 2, 10)):
        rows = np.repeat([gate_alpha / RANK, 3 / RANK], FF)[:, None]
        delta = rows * (b[0].astype(np.float64) @ a[expert].astype(np.float64))
        wanted |= split(delta, f"{MLP}.experts.{expert}", GATE_UP)
    assert largest_difference(ingested_deltas(adapter, card, tmp_path / "out"), wanted) < 1e-6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_modules": ["q_proj", "k_proj"]}, "qkv_proj, which adapter_config.json does not target"),
        ({"target_modules": list(QKV), "rank_pattern": {"k_proj": 2}}, r"found \[4, 32\]; wanted \[2, 32\]"),
        (
            {"target_modules": list(QKV), "alpha_pattern": {"qkv_proj": 2}},
            "pattern 'qkv_proj': found another rank or scale for .*qkv_proj than for its parts",
        ),
        ({"r": 3}, r"found \[4, 32\]; wanted \[3, 32\]"),
    ],
)
def test_a_fused_module_that_the_config_does_not_cover_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    adapter = source(tmp_path / "a", {f"{ATTENTION}.qkv_proj": factors(Q + 2 * KV)}, **config)
    with pytest.raises(AdapterInvalid, match=message):
        plan_adapter(read_adapter(adapter), CARD)


def test_a_fused_module_of_another_width_is_refused(tmp_path: Path) -> None:
    adapter = source(tmp_path / "a", {f"{ATTENTION}.qkv_proj": factors(3 * Q)})
    with pytest.raises(AdapterInvalid, match=r"qkv_proj.lora_B.weight shape: found \[96, 4\]; wanted \[64, 4\]"):
        plan_adapter(read_adapter(adapter), CARD)


def test_a_fused_module_beside_one_of_its_parts_is_refused(tmp_path: Path) -> None:
    pairs = {f"{ATTENTION}.qkv_proj": factors(Q + 2 * KV), f"{ATTENTION}.k_proj": factors(KV)}
    with pytest.raises(AdapterInvalid, match="a second pair for one projection"):
        plan_adapter(read_adapter(source(tmp_path / "a", pairs)), CARD)


def test_split_projections_for_a_base_that_fuses_them_are_refused(tmp_path: Path) -> None:
    (qkv, *rest) = CARD.sites
    assert qkv.site is Site.QKV
    fused = PartGeometry("q", f"{ATTENTION}.qkv_proj", qkv.out_dim, 0)
    card = msgspec.structs.replace(CARD, sites=(msgspec.structs.replace(qkv, parts=(fused,)), *rest))
    adapter = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj", "k_proj", "v_proj"])
    with pytest.raises(AdapterInvalid, match=r"module model.layers.0.self_attn.k_proj; wanted .*qkv_proj"):
        plan_adapter(read_adapter(adapter), card)


def test_a_fused_name_that_this_base_has_no_parts_for_is_refused(tmp_path: Path) -> None:
    card = tiny_cards()["mixtral"]
    adapter = source(tmp_path / "a", {f"{MLP}.gate_up_proj": factors(2 * FF)})
    with pytest.raises(AdapterInvalid, match=r"module model.layers.0.mlp.gate_up_proj"):
        plan_adapter(read_adapter(adapter), card)
