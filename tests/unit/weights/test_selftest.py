"""The self-test catches what packing could get wrong: each fault is planted in a file that verifies.

The faults are made by changing what the packer is told (files, config, or the plan), so that the packed file is
whole, hashed and consistent, and only means something else.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.errors import AdapterFailed, AdapterInvalid, Internal
from infinilora.weights.check import plan_adapter
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.ingest import ingest
from infinilora.weights.packed import packed_ranges, read_header, write_packed
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.plan import AdapterPlan, PartPlan, SitePlan
from infinilora.weights.reference import EXACT
from infinilora.weights.selftest import self_test
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import Array, open_tensors
from support.cards import make_card, tiny_cards

CARDS = tiny_cards()
MOE = CARDS["qwen2_moe"]


def tensors_of(directory: Path) -> dict[str, Array]:
    file = open_tensors(directory / TENSORS_FILE)
    return {name: np.array(file.read(name)) for name in file.tensors}


def packed_with(tmp_path: Path, source: Path, card: BaseCard, change: Callable[[AdapterPlan], AdapterPlan]) -> Path:
    """The packed file of a plan that was changed on its way."""
    plan = change(plan_adapter(read_adapter(source), card))
    with (tmp_path / "packed").open("wb") as file:
        write_packed(plan, file)
    return tmp_path / "packed"


def in_part(site: Site, part: str, change: Callable[[PartPlan], PartPlan]) -> Callable[[AdapterPlan], AdapterPlan]:
    """Change one part of one site of layer 1."""

    def in_site(plan: SitePlan) -> SitePlan:
        if (plan.geometry.layer, plan.geometry.site) != (1, site):
            return plan
        return SitePlan(plan.geometry, tuple(change(p) if p.entry.name == part else p for p in plan.parts))

    def in_plan(plan: AdapterPlan) -> AdapterPlan:
        return with_fields(plan, sites=tuple(in_site(site_plan) for site_plan in plan.sites))

    return in_plan


def with_fields(plan: AdapterPlan, **fields: Any) -> AdapterPlan:
    return dataclasses.replace(plan, **fields)


def test_a_right_file_passes_for_every_family(tmp_path: Path) -> None:
    for name, card in CARDS.items():
        source = write_peft_adapter(tmp_path / name, card, rank=3)
        ingest(source, card, tmp_path / "out")
        tested = self_test(source, card, tmp_path / "out")
        assert tested.error < 1e-14
        assert tested.relative < 1e-12


@pytest.mark.parametrize("site", [Site.MOE_GATE_UP, Site.SHARED_GATE_UP])
def test_swapped_gate_and_up_are_seen(tmp_path: Path, site: Site) -> None:
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)

    def swap(plan: AdapterPlan) -> AdapterPlan:
        sites = []
        for s in plan.sites:
            if s.geometry.site is site:
                gate, up = s.parts
                sites.append(SitePlan(s.geometry, (PartPlan(gate.entry, up.pairs), PartPlan(up.entry, gate.pairs))))
            else:
                sites.append(s)
        return with_fields(plan, sites=tuple(sites))

    tested = self_test(source, MOE, packed_with(tmp_path, source, MOE, swap))
    assert tested.error > 0.1
    assert f"site {site.label} part gate" in tested.where or f"site {site.label} part up" in tested.where


def test_a_wrong_scale_of_one_part_is_seen(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)

    def slightly(part: PartPlan) -> PartPlan:
        entry = msgspec.structs.replace(part.entry, scale=part.entry.scale * (1 + 1e-4))
        return PartPlan(entry, part.pairs)

    tested = self_test(source, MOE, packed_with(tmp_path, source, MOE, in_part(Site.QKV, "k", slightly)))
    assert tested.error > EXACT
    assert tested.where == "layer 1 site qkv part k"


def test_a_wrong_order_of_experts_is_seen(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)

    def turn(part: PartPlan) -> PartPlan:
        return PartPlan(part.entry, (part.pairs[1], part.pairs[0], *part.pairs[2:]))

    tested = self_test(source, MOE, packed_with(tmp_path, source, MOE, in_part(Site.MOE_DOWN, "down", turn)))
    assert tested.error > 0.1
    assert tested.where.startswith("layer 1 site moe_down part down expert ")


def test_a_small_expert_does_not_hide_behind_large_ones(tmp_path: Path) -> None:
    """One expert is a billion times smaller than its neighbours, and is left out."""
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)
    tensors = tensors_of(source)
    for name in tensors:
        if "experts.2.up_proj.lora_B" in name:
            tensors[name] *= np.float32(1e-9)
    write_tensors(source / TENSORS_FILE, tensors)

    def drop(part: PartPlan) -> PartPlan:
        return PartPlan(part.entry, tuple(None if e == 2 else pair for e, pair in enumerate(part.pairs)))

    tested = self_test(source, MOE, packed_with(tmp_path, source, MOE, in_part(Site.MOE_GATE_UP, "up", drop)))
    assert tested.error > 0.1
    assert tested.where == "layer 1 site moe_gate_up part up expert 2"


def test_one_wrong_number_is_seen(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)
    ingest(source, MOE, tmp_path / "out")
    tensors = tensors_of(source)
    tensors["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"][3, 7] *= np.float32(1.001)
    write_tensors(source / TENSORS_FILE, tensors)
    tested = self_test(source, MOE, tmp_path / "out")
    assert tested.error > EXACT
    assert tested.where == "layer 0 site o part o"


def test_a_missing_and_an_added_site_are_seen(tmp_path: Path) -> None:
    whole = write_peft_adapter(tmp_path / "whole", MOE, rank=4)
    part = write_peft_adapter(tmp_path / "part", MOE, rank=4, targets=["q_proj"])
    ingest(part, MOE, tmp_path / "out")
    assert self_test(whole, MOE, tmp_path / "out").error > 0.1
    ingest(whole, MOE, tmp_path / "out")
    assert self_test(part, MOE, tmp_path / "out").error == np.inf


def test_a_zero_adapter_passes(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)
    tensors = tensors_of(source)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor[...] = 0
    write_tensors(source / TENSORS_FILE, tensors)
    ingest(source, MOE, tmp_path / "out")
    tested = self_test(source, MOE, tmp_path / "out")
    assert (tested.error, tested.relative) == (0.0, 0.0)


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)
    ingest(source, MOE, tmp_path / "out")
    data = bytearray((tmp_path / "out").read_bytes())
    with (tmp_path / "out").open("rb") as file:
        _, offset, _ = packed_ranges(read_header(file), 1)[0]
    data[offset] ^= 1
    (tmp_path / "out").write_bytes(data)
    with pytest.raises(AdapterFailed, match="layer 1 site qkv block 0"):
        self_test(source, MOE, tmp_path / "out")


# Faults of the rules ------------------------------------------------------------------------------


def with_config(source: Path, **changes: Any) -> None:
    path = source / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"layers.1.self_attn.v_proj": 16}},
        {"alpha_pattern": {".*v_proj": 7, "v_proj": 8}},
    ],
)
def test_a_misread_scale_is_seen(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The packer reads the one config, the self-test the other: as if one of them had read it wrong."""
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)
    ingest(source, MOE, tmp_path / "out")
    with_config(source, **changes)
    assert self_test(source, MOE, tmp_path / "out").error > EXACT
    ingest(source, MOE, tmp_path / "out")
    assert self_test(source, MOE, tmp_path / "out").error < 1e-14


@pytest.mark.parametrize("place", ["language_model.model.", "model.language_model.", "model.", ""])
def test_a_pattern_of_a_full_name_means_the_module_wherever_the_model_lies(tmp_path: Path, place: str) -> None:
    """EVA writes its patterns so."""
    name = f"{place}layers.1.self_attn.v_proj"
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4, targets=["v_proj"], config={"alpha_pattern": {name: 16}})
    tensors = {key.replace("model.model.layers", f"model.{place}layers"): t for key, t in tensors_of(source).items()}
    write_tensors(source / TENSORS_FILE, tensors)
    manifest = ingest(source, MOE, tmp_path / "out")
    assert [part.scale for site in manifest.sites for part in site.parts] == [2.0, 4.0]


def test_a_packer_that_computes_something_else_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)
    twice = in_part(Site.O, "o", lambda p: PartPlan(msgspec.structs.replace(p.entry, scale=4.0), p.pairs))
    monkeypatch.setattr(
        "infinilora.weights.ingest.plan_adapter", lambda adapter, card, **rest: twice(plan_adapter(adapter, card))
    )
    with pytest.raises(Internal, match="self-test: layer 1 site o part o: found a delta that is off by"):
        ingest(source, MOE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_read_a_second_time_is_refused(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", MOE, rank=4)
    ingest(source, MOE, tmp_path / "out")
    tensors = tensors_of(source)
    tensors["base_model.model.model.layers.0.other.lora_A.weight"] = np.zeros((4, 32), np.float32)
    tensors["base_model.model.model.layers.0.other.lora_B.weight"] = np.zeros((32, 4), np.float32)
    write_tensors(source / TENSORS_FILE, tensors)
    with pytest.raises(AdapterInvalid, match=r"layers\.0\.other: found a module that it does not know"):
        self_test(source, MOE, tmp_path / "out")


# Layouts: the same numbers in another dress -------------------------------------------------------


def flattened(card: BaseCard, directory: Path, *, crossed: bool, version: str) -> Path:
    """A fused adapter written down from per-expert factors, by PEFT's order of rows and columns."""
    dice, rank, experts = np.random.default_rng(3), 2, 4
    tensors: dict[str, Array] = {}
    for layer in range(2):
        for depth, widths in (("", (32, 48)), (".base_layer", (24, 32))):
            in_dim, out_dim = widths[::-1] if crossed else widths
            key = f"base_model.model.model.layers.{layer}.mlp.experts{depth}.lora_"
            tensors[f"{key}A.weight"] = dice.standard_normal((experts * rank, in_dim)).astype(np.float32)
            tensors[f"{key}B.weight"] = dice.standard_normal((out_dim, rank * experts)).astype(np.float32)
    write_peft_adapter(directory, card, rank=rank)
    write_tensors(directory / TENSORS_FILE, tensors)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    with_config(directory, target_modules=[], target_parameters=parameters, peft_version=version)
    return directory


@pytest.mark.parametrize(("crossed", "version"), [(False, "0.21.2"), (True, "0.18.0")])
def test_flattened_experts_are_read_a_second_time(tmp_path: Path, crossed: bool, version: str) -> None:
    card = CARDS["qwen3_moe"]
    source = flattened(card, tmp_path / "a", crossed=crossed, version=version)
    ingest(source, card, tmp_path / "out")
    assert self_test(source, card, tmp_path / "out").error < 1e-14


def test_an_order_of_experts_that_is_turned_in_fused_files_is_seen(tmp_path: Path) -> None:
    card = CARDS["qwen3_moe"]
    source = flattened(card, tmp_path / "a", crossed=False, version="0.21.2")
    ingest(source, card, tmp_path / "out")
    tensors = tensors_of(source)
    key = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    tensors[key] = np.ascontiguousarray(tensors[key].reshape(48, 2, 4).transpose(0, 2, 1).reshape(48, 8))
    write_tensors(source / TENSORS_FILE, tensors)
    assert self_test(source, card, tmp_path / "out").error > 0.1


def test_widths_that_do_not_tell_are_told_by_the_version(tmp_path: Path) -> None:
    """gate_up is [2f, h] and down [h, f]: with h = 2f both ways fit the first."""
    card = make_card("qwen3_moe", num_layers=2, hidden=32, intermediate=16, num_experts=4)
    source = write_peft_adapter(tmp_path / "a", card, rank=2)
    dice = np.random.default_rng(0)
    tensors = {
        f"base_model.model.model.layers.{layer}.mlp.experts.lora_{half}.weight": dice.standard_normal(shape).astype(
            "f4"
        )
        for layer in range(2)
        for half, shape in (("A", (8, 32)), ("B", (32, 8)))
    }
    write_tensors(source / TENSORS_FILE, tensors)
    new = {"target_modules": [], "target_parameters": ["experts.gate_up_proj"], "peft_version": "0.21.2"}
    with_config(source, **new)
    ingest(source, card, tmp_path / "new")
    assert self_test(source, card, tmp_path / "new").error < 1e-14
    with_config(source, peft_version="0.17.1")
    assert self_test(source, card, tmp_path / "new").error > 0.1
    ingest(source, card, tmp_path / "old")
    assert self_test(source, card, tmp_path / "old").error < 1e-14


def rewritten(source: Path, change: Callable[[dict[str, Array]], None]) -> None:
    tensors = tensors_of(source)
    change(tensors)
    write_tensors(source / TENSORS_FILE, {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})


def joined(directory: Path, card: BaseCard) -> Path:
    """One pair for q, k and v together, and one for gate and up, as fused projections are trained."""
    dice = np.random.default_rng(5)
    write_peft_adapter(directory, card, rank=2)
    tensors: dict[str, Array] = {}
    for layer in range(2):
        for module, out in (("self_attn.qkv_proj", 32 + 16 + 16), ("mlp.gate_up_proj", 96)):
            key = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors[f"{key}A.weight"] = dice.standard_normal((2, 32)).astype(np.float32)
            tensors[f"{key}B.weight"] = dice.standard_normal((out, 2)).astype(np.float32)
    write_tensors(directory / TENSORS_FILE, tensors)
    with_config(directory, target_modules=["qkv_proj", "gate_up_proj"])
    return directory


def stacked(directory: Path, card: BaseCard, *, is_shared: bool) -> Path:
    """Three-dimensional pairs of all experts; A of gate_up and B of down may be one for all."""
    dice = np.random.default_rng(6)
    write_peft_adapter(directory, card, rank=2)
    tensors: dict[str, Array] = {}
    for layer in range(2):
        for module, in_dim, out_dim, a_one, b_one in (
            ("gate_up_proj", 32, 48, True, False),
            ("down_proj", 24, 32, False, True),
        ):
            key = f"base_model.model.model.layers.{layer}.mlp.experts.{module}.lora_"
            shape_a = (1 if is_shared and a_one else 4, 2, in_dim)
            shape_b = (1 if is_shared and b_one else 4, out_dim, 2)
            tensors[f"{key}A"] = dice.standard_normal(shape_a).astype(np.float32)
            tensors[f"{key}B"] = dice.standard_normal(shape_b).astype(np.float32)
    write_tensors(directory / TENSORS_FILE, tensors)
    with_config(directory, target_modules=["gate_up_proj", "down_proj"])
    return directory


def test_joined_projections_are_read_a_second_time_and_a_turned_half_is_seen(tmp_path: Path) -> None:
    card = CARDS["llama"]
    source = joined(tmp_path / "a", card)
    ingest(source, card, tmp_path / "out")
    assert self_test(source, card, tmp_path / "out").error < 1e-14

    def turn(tensors: dict[str, Array]) -> None:
        key = "base_model.model.model.layers.1.mlp.gate_up_proj.lora_B.weight"
        tensors[key] = np.concatenate([tensors[key][48:], tensors[key][:48]])

    rewritten(source, turn)
    tested = self_test(source, card, tmp_path / "out")
    assert tested.error > 0.1
    assert tested.where.startswith("layer 1 site gate_up part ")


@pytest.mark.parametrize("is_shared", [False, True])
def test_stacked_experts_are_read_a_second_time_and_a_turned_order_is_seen(tmp_path: Path, is_shared: bool) -> None:
    card = CARDS["qwen3_moe"]
    source = stacked(tmp_path / "a", card, is_shared=is_shared)
    ingest(source, card, tmp_path / "out")
    assert self_test(source, card, tmp_path / "out").error < 1e-14

    def turn(tensors: dict[str, Array]) -> None:
        key = "base_model.model.model.layers.0.mlp.experts.gate_up_proj.lora_B"
        tensors[key] = tensors[key][[1, 0, 2, 3]]

    rewritten(source, turn)
    tested = self_test(source, card, tmp_path / "out")
    assert tested.error > 0.1
    assert tested.where in {f"layer 0 site moe_gate_up part {p} expert {e}" for p in ("gate", "up") for e in (0, 1)}


def test_an_export_of_mlx_is_read_a_second_time_and_its_scale_is_no_alpha(tmp_path: Path) -> None:
    card, dice = CARDS["llama"], np.random.default_rng(7)
    tensors: dict[str, Array] = {}
    for layer in range(2):
        key = f"model.layers.{layer}.self_attn.q_proj.lora_"
        tensors[f"{key}a"] = dice.standard_normal((32, 4)).astype(np.float32)
        tensors[f"{key}b"] = dice.standard_normal((4, 32)).astype(np.float32)
    source = tmp_path / "a"
    source.mkdir()
    write_tensors(source / "adapters.safetensors", tensors)
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    (source / CONFIG_FILE).write_text(json.dumps(config))
    ingest(source, card, tmp_path / "out")
    assert self_test(source, card, tmp_path / "out").error < 1e-14
    with_config(source, lora_parameters={"rank": 4, "scale": 5.0, "dropout": 0.0})
    assert self_test(source, card, tmp_path / "out").error > 0.1
