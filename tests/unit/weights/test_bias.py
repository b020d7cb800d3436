"""A bias of lora_B from file to packed vector: scaled once, in its own rows, and seen by the self-test."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from infinilora.pool.bind import site_weights
from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.errors import AdapterFailed, AdapterInvalid
from infinilora.weights.check import plan_adapter
from infinilora.weights.ingest import ingest
from infinilora.weights.packed import packed_ranges, read_header, write_packed
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.plan import AdapterPlan, PartPlan
from infinilora.weights.reference import EXACT
from infinilora.weights.selftest import self_test
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import Array, open_tensors
from support.cards import make_card

CARD = make_card("llama", heads=4, kv_heads=1, head_dim=6, hidden=24, intermediate=31)
"""Widths at which no vector fills a multiple of 64 bytes."""
TARGETS = ["q_proj", "v_proj", "down_proj"]


def biased(directory: Path, card: BaseCard = CARD, *, dtype: str = "F32", num_short: int = 0) -> dict[str, Array]:
    """An adapter of scale 2 whose modules have biases; its tensors. The first bias is `num_short` values too short."""
    write_peft_adapter(directory, card, rank=3, targets=TARGETS, dtype=dtype, config={"lora_bias": True})
    file, dice = open_tensors(directory / TENSORS_FILE), np.random.default_rng(3)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    for name in [name for name in tensors if name.endswith("lora_B.weight")]:
        bias = dice.standard_normal(tensors[name].shape[:1]).astype(tensors[name].dtype)
        tensors[name.replace(".weight", ".bias")] = bias[: len(bias) - num_short]
        num_short = 0
    write_tensors(directory / TENSORS_FILE, tensors)
    return tensors


def bias_of(tensors: dict[str, Array], module: str) -> Array:
    """Of layer 1, times the scale."""
    return 2 * np.asarray(tensors[f"base_model.model.model.layers.1.{module}.lora_B.bias"], np.float32)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_packed_bias_is_the_files_times_the_scale(dtype: str, tmp_path: Path) -> None:
    tensors = biased(tmp_path / "a", dtype=dtype)
    ingest(tmp_path / "a", CARD, tmp_path / "packed")
    with (tmp_path / "packed").open("rb") as file:
        header = read_header(file)
        for entry, offset, num_bytes in packed_ranges(header, 1):
            file.seek(offset)
            data = torch.frombuffer(bytearray(file.read(num_bytes)), dtype=torch.uint8)
            parts = site_weights(entry, header.manifest.dtype, data)
            modules = {Site.QKV: ("self_attn.q_proj", "self_attn.v_proj"), Site.DOWN: ("mlp.down_proj",)}[entry.site]
            for part, module in zip(parts, modules, strict=True):
                assert part.bias is not None
                np.testing.assert_array_equal(part.bias.numpy(), bias_of(tensors, module))


def test_any_safetensors_reader_finds_it_by_name(tmp_path: Path) -> None:
    tensors = biased(tmp_path / "a")
    ingest(tmp_path / "a", CARD, tmp_path / "packed")
    packed = load_file(tmp_path / "packed")
    for part, module in (("qkv.q", "self_attn.q_proj"), ("qkv.v", "self_attn.v_proj"), ("down.down", "mlp.down_proj")):
        np.testing.assert_array_equal(packed[f"1.{part}.bias"], bias_of(tensors, module))


def test_a_fused_projections_bias_is_cut_into_its_parts_rows(tmp_path: Path) -> None:
    widths = [CARD.geometry()[1, Site.QKV].parts[n].out_dim for n in range(3)]
    dice, stem = np.random.default_rng(1), "base_model.model.model.layers.{}.self_attn.qkv_proj"
    tensors = {}
    for layer in range(2):
        name = stem.format(layer)
        tensors[f"{name}.lora_A.weight"] = dice.standard_normal((3, 24), np.float32)
        tensors[f"{name}.lora_B.weight"] = dice.standard_normal((sum(widths), 3), np.float32)
        tensors[f"{name}.lora_B.bias"] = dice.standard_normal(sum(widths), np.float32)
    config = {"lora_bias": True, "target_modules": ["qkv_proj"]}
    write_peft_adapter(tmp_path / "a", CARD, rank=3, targets=["q_proj"], config=config)
    write_tensors(tmp_path / "a" / TENSORS_FILE, tensors)
    ingest(tmp_path / "a", CARD, tmp_path / "packed")
    packed = load_file(tmp_path / "packed")
    found = np.concatenate([packed[f"1.qkv.{part}.bias"] for part in "qkv"])
    np.testing.assert_array_equal(found, 2 * tensors[f"{stem.format(1)}.lora_B.bias"])


def test_a_bias_of_another_width_is_named(tmp_path: Path) -> None:
    biased(tmp_path / "a", num_short=1)
    with pytest.raises(AdapterInvalid, match=r"lora_B\.bias shape: found \[23\]; wanted \[24\]"):
        plan_adapter(read_adapter(tmp_path / "a"), CARD)


@pytest.mark.parametrize("fault", ["unscaled", "left out", "of another part"])
def test_the_self_test_sees_a_wrong_bias(fault: str, tmp_path: Path) -> None:
    biased(tmp_path / "a")

    def wrong(part: PartPlan) -> PartPlan:
        assert part.bias is not None
        if fault == "unscaled":
            return PartPlan(part.entry, part.pairs, part.bias._replace(scale=1.0))
        if fault == "left out":
            return PartPlan(part.entry, part.pairs, part.bias._replace(scale=0.0))
        other = part.bias.tensor.replace("layers.1.", "layers.0.")
        return PartPlan(part.entry, part.pairs, part.bias._replace(tensor=other))

    plan = plan_adapter(read_adapter(tmp_path / "a"), CARD)
    last = plan.sites[-1]
    sites = (*plan.sites[:-1], type(last)(last.geometry, tuple(wrong(part) for part in last.parts)))
    for name, each in (("right", plan.sites), ("wrong", sites)):
        changed = AdapterPlan(plan.source, plan.base, plan.num_layers, plan.dtype, each)
        with (tmp_path / name).open("wb") as file:
            write_packed(changed, file)
    assert self_test(tmp_path / "a", CARD, tmp_path / "right").error < EXACT
    found = self_test(tmp_path / "a", CARD, tmp_path / "wrong")
    assert found.error > 0.01
    assert "layer 1 site down" in found.where


@pytest.mark.parametrize("vector", ["bias", "colscale"])
def test_a_vector_of_experts_is_refused_where_it_is_bound(vector: str, tmp_path: Path) -> None:
    biased(tmp_path / "a")
    manifest = ingest(tmp_path / "a", CARD, tmp_path / "packed")
    entry = manifest.sites[0]
    part = msgspec.structs.replace(entry.parts[0], has_bias=vector == "bias", has_colscale=vector == "colscale")
    strange = msgspec.structs.replace(entry, parts=(part,), num_experts=2)
    words = {"bias": "a bias", "colscale": "a column scale"}[vector]
    with pytest.raises(AdapterFailed, match=f"layer 0 site qkv part q: found {words} of experts"):
        site_weights(strange, "F32", torch.zeros(8192, dtype=torch.uint8))
