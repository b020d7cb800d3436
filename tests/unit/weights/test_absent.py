"""What a configuration targets and the file does not hold: said module by module, and never guessed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.check import plan_adapter
from infinilora.weights.peft import read_adapter
from infinilora.weights.plan import AdapterPlan
from infinilora.weights.synth import write_peft_adapter
from support.cards import make_card, tiny_cards
from support.deltas import rename_tensors, write_source

LLAMA, MIXTRAL = tiny_cards()["llama"], tiny_cards()["mixtral"]


def plan(directory: Path, card: BaseCard, *, without: str = "", **config: Any) -> AdapterPlan:
    """A plan of an adapter of every projection but those with `without` in their names."""
    write_peft_adapter(directory, card, rank=4, config=config)
    rename_tensors(directory, {}, keep=lambda name: not without or without not in name)
    return plan_adapter(read_adapter(directory), card)


def absent(found: AdapterPlan) -> list[tuple[str, int]]:
    return [(row.module, row.experts) for row in found.rows() if row.verdict == "absent"]


def test_absent_modules_are_listed_and_counted(tmp_path: Path) -> None:
    found = plan(tmp_path, LLAMA, without="k_proj")
    assert absent(found) == [(f"model.layers.{layer}.self_attn.k_proj", 0) for layer in range(2)]
    (note,) = found.notes
    assert (note.code, note.count) == ("modules_absent", 2)
    assert "model.layers.0.self_attn.k_proj, model.layers.1.self_attn.k_proj" in note.text


def test_absent_experts_of_a_projection_are_one_row(tmp_path: Path) -> None:
    found = plan(tmp_path, MIXTRAL, without="layers.0.mlp.experts.2.")
    projections = ("gate_proj", "up_proj", "down_proj")
    assert absent(found) == [(f"model.layers.0.mlp.experts.{{expert}}.{name}", 1) for name in projections]
    assert next(row for row in found.rows() if row.verdict == "absent").reason.endswith("for experts 2 of 4")
    assert found.notes[0].count == 3


def test_fused_experts_that_are_named_and_absent_are_listed(tmp_path: Path) -> None:
    config = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    write_peft_adapter(tmp_path, MIXTRAL, rank=4, targets=["q_proj"], config=config)
    found = plan_adapter(read_adapter(tmp_path), MIXTRAL)
    assert absent(found) == [(f"model.layers.{layer}.mlp.experts.{{expert}}.down_proj", 4) for layer in range(2)]


def test_earlier_names_in_the_configuration_are_understood(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, MIXTRAL, rank=4, targets=["q_proj"], config={"target_modules": ["q_proj", "w2"]})
    found = plan_adapter(read_adapter(tmp_path), MIXTRAL)
    assert absent(found) == [(f"model.layers.{layer}.mlp.experts.{{expert}}.down_proj", 4) for layer in range(2)]


@pytest.mark.parametrize(
    ("module", "exclude"),
    [
        ("model.layers.0.block_sparse_moe.gate", "model.layers.1.block_sparse_moe.gate"),
        ("model.layers.0.block_sparse_moe.gate", r".*\.1\.block_sparse_moe\..*"),
        ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate"),
        ("language_model.layers.0.mlp.gate", "language_model.layers.1.mlp.gate"),
    ],
)
def test_exclusions_are_held_against_the_names_of_the_file(tmp_path: Path, module: str, exclude: str) -> None:
    tensors = {
        f"base_model.model.{module}.lora_A.weight": np.ones((4, 32), np.float32),
        f"base_model.model.{module}.lora_B.weight": np.ones((4, 4), np.float32),
    }
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["gate"]}
    excluded = exclude if "*" in exclude else [exclude]
    source = write_source(tmp_path / "a", config | {"exclude_modules": excluded}, tensors)
    assert plan_adapter(read_adapter(source), MIXTRAL).notes == ()
    whole = write_source(tmp_path / "b", config, tensors)
    with pytest.raises(AdapterInvalid, match="layers 1: found no tensors at all"):
        plan_adapter(read_adapter(whole), MIXTRAL)


PAIRS = {
    "self_attn.qkv_proj": ((4, 32), (64, 4)),
    "mlp.gate_up_proj": ((4, 32), (96, 4)),
    "mlp.experts.gate_up_proj": ((4, 4, 32), (4, 96, 4)),
    "mlp.experts.2.gate_up_proj": ((4, 32), (96, 4)),
    "mlp.experts.w2": ((1, 4, 48), (4, 32, 4)),
    "block_sparse_moe.w2": ((1, 4, 48), (4, 32, 4)),
}


def together(directory: Path, name: str, layers: int, **config: Any) -> Path:
    """An adapter of one kind of module that stands for several, in the first `layers` layers."""
    shapes = dict(zip("AB", PAIRS[name], strict=True))
    tensors = {
        f"base_model.model.model.layers.{n}.{name}.lora_{half}.weight": np.ones(shape, np.float32)
        for n in range(layers)
        for half, shape in shapes.items()
    }
    settings = {"peft_type": "LORA", "r": 4, "target_modules": [name.rpartition(".")[2]]}
    return write_source(directory, settings | config, tensors)


@pytest.mark.parametrize("name", PAIRS)
def test_a_missing_layer_of_fused_or_stacked_modules_is_refused(tmp_path: Path, name: str) -> None:
    card = MIXTRAL if "experts" in name or "moe" in name else LLAMA
    assert plan_adapter(read_adapter(together(tmp_path / "a", name, 2)), card).sites
    with pytest.raises(AdapterInvalid, match="layers 1: found no tensors at all"):
        plan_adapter(read_adapter(together(tmp_path / "b", name, 1)), card)


@pytest.mark.parametrize("name", ["mlp.experts.gate_up_proj", "mlp.experts.w2", "block_sparse_moe.w2"])
def test_a_missing_layer_of_a_parameter_is_refused(tmp_path: Path, name: str) -> None:
    by_parameter = {"target_modules": [], "target_parameters": [name]}
    assert not plan_adapter(read_adapter(together(tmp_path / "a", name, 2, **by_parameter)), MIXTRAL).absent
    with pytest.raises(AdapterInvalid, match="layers 1: found no tensors at all"):
        plan_adapter(read_adapter(together(tmp_path / "b", name, 1, **by_parameter)), MIXTRAL)


def test_a_pattern_that_would_also_match_a_fused_name_misses_nothing(tmp_path: Path) -> None:
    config = {"target_modules": r".*v_proj", "exclude_modules": ["model.layers.0.self_attn.v_proj"]}
    write_peft_adapter(tmp_path, LLAMA, rank=4, targets=["v_proj"], config=config)
    rename_tensors(tmp_path, {}, keep=lambda name: "layers.1." in name)
    assert plan_adapter(read_adapter(tmp_path), LLAMA).notes == ()


@pytest.mark.parametrize("outer", ["embed_tokens", "lm_head"])
def test_embedding_and_head_are_of_no_layer(tmp_path: Path, outer: str) -> None:
    card = make_card("llama", outer=True)
    targets = ["down_proj", outer]
    write_peft_adapter(tmp_path, card, rank=4, targets=targets)
    rename_tensors(tmp_path, {}, keep=lambda name: "layers.0." not in name)
    with pytest.raises(AdapterInvalid, match="layers 0: found no tensors at all"):
        plan_adapter(read_adapter(tmp_path), card)
    write_peft_adapter(tmp_path, card, rank=4, targets=targets)
    rename_tensors(tmp_path, {}, keep=lambda name: outer not in name)
    found = plan_adapter(read_adapter(tmp_path), card)
    assert [row.module.rpartition(".")[2] for row in found.absent] == [outer]


def test_nothing_is_missed_where_the_weights_decide(tmp_path: Path) -> None:
    assert plan(tmp_path, LLAMA, without="layers.1.", target_modules=None).notes == ()


def test_what_is_packed_is_a_row_for_each_part(tmp_path: Path) -> None:
    found = plan(tmp_path, MIXTRAL, without="experts.1.up_proj")
    rows = {row.module: row for row in found.rows() if row.verdict == "packed"}
    q, up = rows["model.layers.1.self_attn.q_proj"], rows["model.layers.1.mlp.experts.{expert}.up_proj"]
    assert (q.site, q.layer, q.rank, q.scale, q.num_bytes, q.experts) == ("qkv", 1, 4, 2.0, 4 * (32 + 32) * 4, 0)
    assert (up.site, up.experts, up.num_bytes) == ("moe_gate_up", 3, 4 * 4 * (32 + 48) * 4)
    assert len(rows) == sum(len(site.parts) for site in MIXTRAL.sites)
