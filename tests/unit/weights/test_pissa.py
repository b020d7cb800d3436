"""Adapters that began with a part of the base: with their first values beside them, the difference is served."""

import hashlib
import json
import shutil
import tarfile
import types
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, LoraGAConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from infinilora.protocol.adapter import BaseCard, Table, encode_manifest
from infinilora.protocol.errors import AdapterInvalid, SourceNotFound
from infinilora.weights.ingest import ingest
from infinilora.weights.names import EMBED, HEAD
from infinilora.weights.unpack import INITIAL_DIRS, FileLimits, unpack
from support.cards import make_card
from support.deltas import Deltas, ingested_deltas, largest_difference, rename_tensors

CARD = make_card("llama", intermediate=24)
MODULES = ["q_proj", "v_proj", "down_proj"]


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, head_dim=8, vocab_size=64, intermediate_size=24)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: m.weight.detach().clone() for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def prepare(model: nn.Module, kind: str, rank: int) -> dict[str, Any]:
    """What PEFT's own preprocessing leaves at each module before such an adapter is made."""
    dice = torch.Generator().manual_seed(5)
    for name, module in model.named_modules():
        if not name.endswith(tuple(MODULES)) or not isinstance(module, nn.Linear):
            continue
        num_out, num_in = module.weight.shape
        if kind == "lora_ga":
            module._peft_loraga_grad = torch.randn(num_out, num_in, generator=dice)
        if kind == "corda":
            u, s, v = torch.linalg.svd(module.weight.detach(), full_matrices=False)
            module.eigens = types.SimpleNamespace(U_WC=u[:, :rank], S_WC=s[:rank], V_WC=v.T[:, :rank])  # type: ignore[assignment]
    return {"lora_ga_config": LoraGAConfig()} if kind == "lora_ga" else {}


def trained(directory: Path, kind: str, *, first: str = "pissa_init", says: Any = None, **config: Any) -> Deltas:
    """Train, that is move at random, an adapter of this kind, saved with its first values; what it does to the base.

    `says`: what its configuration has for `init_lora_weights` in the end.
    """
    model = llama()
    before = weights_of(model)
    more = prepare(model, kind, config.get("r", 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = {"target_modules": MODULES, **more, **config}
        peft = get_peft_model(model, LoraConfig(init_lora_weights=kind, **config))
        if says is not None:
            peft.peft_config["default"].init_lora_weights = says
        if first:
            peft.save_pretrained(directory / first)
        move(peft)
        peft.save_pretrained(directory)
    return {
        name: (layer.get_base_layer().weight + layer.get_delta_weight("default") - before[name]).detach().numpy()
        for name, layer in peft.base_model.model.named_modules()
        if isinstance(layer, LoraLayer)
    }


@torch.no_grad()
def move(model: PeftModel) -> None:
    dice = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn(parameter.shape, generator=dice), alpha=0.1)


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_configs(*directories: Path, **changes: Any) -> None:
    for directory in directories:
        change_config(directory, **changes)


def refusal(directory: Path) -> str:
    out = directory / "packed"
    with pytest.raises(AdapterInvalid) as refused:
        ingest(directory, CARD, out)
    assert not out.exists()
    assert "found" in refused.value.message
    assert "wanted" in refused.value.message
    return refused.value.message


@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga"])
@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "lora_alpha": 12},
        {"r": 4, "lora_alpha": 8, "use_rslora": True},
        {"r": 4, "rank_pattern": {"v_proj": 3, "layers.1.mlp.down_proj": 6}, "alpha_pattern": {"down_proj": 5}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_the_difference_to_the_first_values_is_what_training_did_to_the_base(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    if kind == "corda" and "rank_pattern" in config:
        config = {"r": 4, "alpha_pattern": {"down_proj": 5}}  # its preparation knows one rank
    wanted = trained(tmp_path, kind, first=f"{kind.partition('_niter')[0]}_init", **config)
    found = ingested_deltas(tmp_path, CARD, tmp_path / "packed")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-5  # the base's weights are rounded to fp32 on the way


def test_it_equals_what_peft_converts_it_to(tmp_path: Path) -> None:
    first = tmp_path / "own" / "pissa_init"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(llama(), LoraConfig(init_lora_weights="pissa", r=4, target_modules=MODULES))
        model.save_pretrained(first)
        move(model)
        model.save_pretrained(tmp_path / "own")
        change_config(first, init_lora_weights=True)
        model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(first))
    own = ingested_deltas(tmp_path / "own", CARD, tmp_path / "own.packed")
    converted = ingested_deltas(tmp_path / "converted", CARD, tmp_path / "converted.packed")
    assert largest_difference(own, converted) < 1e-6


def test_first_values_may_be_of_another_dtype(tmp_path: Path) -> None:
    wanted = trained(tmp_path, "olora", first="olora_init", r=4)
    narrowed_to(tmp_path / "olora_init", np.float16)
    found = ingested_deltas(tmp_path, CARD, tmp_path / "packed")
    assert largest_difference(found, wanted) < 1e-2


def narrowed_to(directory: Path, kind: Any) -> None:
    file = directory / "adapter_model.safetensors"
    save_file({key: tensor.astype(kind) for key, tensor in load_file(file).items()}, file)


def card_of(model: nn.Module, *, is_tied: bool) -> BaseCard:
    """With the tables of its embedding and its head."""
    weights = {EMBED: model.get_input_embeddings().weight, HEAD: model.get_output_embeddings().weight}  # type: ignore[operator]
    tables = {
        module: Table(dtype="F32", shape=(64, 32), sha256=hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest())
        for module, weight in weights.items()
    }
    assert (tables[EMBED] == tables[HEAD]) == is_tied
    return msgspec.structs.replace(make_card("llama", intermediate=24, vocab_size=64, outer=True), tables=tables)


def test_a_head_that_began_in_the_base_is_served_without_the_table_that_peft_saves_beside_it(tmp_path: Path) -> None:
    card = card_of(llama(), is_tied=False)
    wanted = trained(tmp_path, "pissa", r=4, target_modules=["q_proj", "lm_head"])
    with pytest.raises(
        AdapterInvalid, match=r"lm_head\.base_layer\.weight: .*began with a part .*save_embedding_layers=F"
    ):
        ingest(tmp_path, card, tmp_path / "packed")
    rename_tensors(tmp_path, {}, keep=lambda key: "base_layer" not in key)
    found = ingested_deltas(tmp_path, card, tmp_path / "packed")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-5


def test_a_head_that_began_in_a_table_of_embedding_and_head_is_refused(tmp_path: Path) -> None:
    card = card_of(llama(), is_tied=False)
    tied = msgspec.structs.replace(card, tables=dict.fromkeys(card.tables, card.tables[HEAD]))
    trained(tmp_path, "pissa", r=4, target_modules=["q_proj", "lm_head"])
    rename_tensors(tmp_path, {}, keep=lambda key: "base_layer" not in key)
    with pytest.raises(AdapterInvalid, match=r"a pair on lm_head: found .*ties it to its embedding.*target_modules"):
        ingest(tmp_path, tied, tmp_path / "packed")


def test_without_first_values_it_is_refused_and_told_where_they_belong(tmp_path: Path) -> None:
    trained(tmp_path, "pissa", first="", r=4)
    said = refusal(tmp_path)
    assert "'pissa'" in said
    assert "pissa_init/" in said


def test_loftq_is_refused_even_with_first_values(tmp_path: Path) -> None:
    trained(tmp_path, "pissa", r=4)
    change_config(tmp_path, init_lora_weights="loftq", loftq_config={"loftq_bits": 4})
    assert "'loftq'" in refusal(tmp_path)


def test_an_unconverted_adapter_that_says_it_is_plain_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, "pissa", says=True, r=4)
    said = refusal(tmp_path)
    assert "init_lora_weights" in said
    assert "pissa_init/" in said


def test_first_values_beside_a_converted_adapter_are_history(tmp_path: Path) -> None:
    trained(tmp_path / "plain", "gaussian", first="", r=8)
    trained(tmp_path / "beside", "gaussian", first="", r=8)
    trained(tmp_path / "other", "pissa", r=4)
    shutil.copytree(tmp_path / "other" / "pissa_init", tmp_path / "beside" / "pissa_init")
    one, other = (ingest(tmp_path / name, CARD, tmp_path / f"{name}.packed") for name in ("plain", "beside"))
    assert encode_manifest(one) == encode_manifest(other)


def first_layer(key: str) -> bool:
    return "layers.1" not in key


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda first: rename_tensors(first, {}, keep=first_layer), ["pissa_init/adapter_model", "layers.1.mlp"]),
        (lambda first: rename_tensors(first.parent, {}, keep=first_layer), ["layers.1.mlp.down_proj"]),
        (lambda first: change_config(first, lora_alpha=9), ["pissa_init/adapter_config.json", "lora_alpha", "9"]),
        (lambda first: change_config(first, use_rslora=True), ["pissa_init/adapter_config.json", "use_rslora"]),
        (lambda first: change_config(first, peft_type="IA3"), ["pissa_init/adapter_config.json", "IA3"]),
        (
            lambda first: (first / "adapter_model.safetensors").write_bytes(b"cut"),
            ["pissa_init/adapter_model.safetensors"],
        ),
        (lambda first: shutil.copytree(first, first.parent / "olora_init"), ["pissa_init/ and olora_init/"]),
        (lambda first: change_config(first.parent, use_dora=True), ["use_dora"]),
        (lambda first: change_config(first.parent, target_parameters=["mlp.gate.weight"]), ["target_parameters"]),
        (
            lambda first: change_configs(first, first.parent, use_rslora=True, rank_pattern={"x": 4}),
            ["use_rslora", "rank_pattern"],
        ),
    ],
    ids=["a pair less", "a pair more", "alpha", "rslora", "kind", "cut", "two", "dora", "parameters", "patterns"],
)  # fmt: skip
def test_first_values_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], object], says: list[str]
) -> None:
    trained(tmp_path, "pissa", r=4)
    damage(tmp_path / "pissa_init")
    said = refusal(tmp_path)
    for word in says:
        assert word in said, said


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_of_the_first_values_is_none(tmp_path: Path, name: str) -> None:
    trained(tmp_path, "pissa", r=4)
    (tmp_path / "pissa_init" / name).unlink()
    with pytest.raises((AdapterInvalid, SourceNotFound), match=f"pissa_init/{name}"):
        ingest(tmp_path, CARD, tmp_path / "packed")


def test_the_rank_limit_counts_the_joined_pairs(tmp_path: Path) -> None:
    trained(tmp_path, "pissa", r=4)
    ingest(tmp_path, CARD, tmp_path / "packed", max_rank=8)
    with pytest.raises(AdapterInvalid, match="found 8; wanted at most 7"):
        ingest(tmp_path, CARD, tmp_path / "packed", max_rank=7)


def test_other_first_values_are_another_adapter(tmp_path: Path) -> None:
    trained(tmp_path, "pissa", r=4)
    one = ingest(tmp_path, CARD, tmp_path / "packed")
    change_config(tmp_path / "pissa_init", runtime_config=None, revision="other")
    assert ingest(tmp_path, CARD, tmp_path / "packed").source_digest != one.source_digest


@pytest.mark.parametrize("top", ["", "run-7/"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_brings_them_along(tmp_path: Path, kind: str, top: str) -> None:
    source = tmp_path / "source"
    trained(source, "pissa", r=4)
    archive = tmp_path / f"a.{kind}"
    files = sorted(path for path in source.rglob("*") if path.is_file())
    if kind == "tar":
        with tarfile.open(archive, "w") as tar:
            for path in files:
                tar.add(path, f"{top}{path.relative_to(source)}")
    else:
        with zipfile.ZipFile(archive, "w") as zipped:
            for path in files:
                zipped.write(path, f"{top}{path.relative_to(source)}")
    target = tmp_path / "target"
    target.mkdir()
    unpacked = unpack(archive, target, FileLimits())
    one, other = ingest(unpacked, CARD, tmp_path / "1.packed"), ingest(source, CARD, tmp_path / "2.packed")
    assert encode_manifest(one) == encode_manifest(other)


def test_every_kind_has_its_directory() -> None:
    assert {name.removesuffix("_init") for name in INITIAL_DIRS} == {"pissa", "olora", "corda", "lora_ga"}
