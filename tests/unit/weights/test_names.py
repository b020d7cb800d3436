"""The names that trainers give to one and the same tensor."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.check import plan_adapter
from infinilora.weights.keys import pairs_of
from infinilora.weights.names import ModuleIndex
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import Array, open_tensors
from support.cards import make_card, tiny_cards
from support.deltas import ingested_deltas, largest_difference

CARD = tiny_cards()["llama"]
PEFT = "base_model.model."
Rename = Callable[[str], str]


def tensors_of(directory: Path) -> dict[str, Array]:
    file = open_tensors(directory / TENSORS_FILE)
    return {name: np.array(file.read(name)) for name in file.tensors}


def renamed(directory: Path, rename: Rename) -> Path:
    tensors = tensors_of(directory)
    write_tensors(directory / TENSORS_FILE, {rename(name): value for name, value in tensors.items()})
    return directory


def adapter(
    directory: Path, rename: Rename = lambda name: name, targets: tuple[str, ...] = ("q_proj", "up_proj")
) -> Path:
    return renamed(write_peft_adapter(directory, CARD, rank=4, targets=targets, seed=6), rename)


def infixed(name: str) -> Rename:
    return lambda key: key.replace(".weight", f".{name}.weight")


def below(prefix: str, *, instead_of: str = PEFT) -> Rename:
    return lambda key: prefix + key.removeprefix(instead_of)


@pytest.mark.parametrize(
    "rename",
    [
        infixed("default"),
        infixed("ranking"),
        infixed("lora"),
        infixed("weight"),
        below(""),
        below(PEFT + PEFT),
        below(f"_orig_mod.{PEFT}"),
        below(f"module.{PEFT}"),
        below(f"{PEFT}_orig_mod."),
        lambda key: key.replace(".self_attn.", "._fsdp_wrapped_module.self_attn._checkpoint_wrapped_module."),
        below(f"{PEFT}layers.", instead_of=f"{PEFT}model.layers."),
        below(f"{PEFT}language_model.", instead_of=PEFT),
        below(f"{PEFT}language_model.layers.", instead_of=f"{PEFT}model.layers."),
        below(f"{PEFT}model.language_model.layers.", instead_of=f"{PEFT}model.layers."),
        below("language_model.model.layers.", instead_of=f"{PEFT}model.layers."),
    ],
)
def test_a_consistent_spelling_is_the_same_adapter(tmp_path: Path, rename: Rename) -> None:
    wanted = ingested_deltas(adapter(tmp_path / "plain"), CARD, tmp_path / "out")
    found = ingested_deltas(adapter(tmp_path / "other", rename), CARD, tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) == 0


def only(part: str, rename: Rename) -> Rename:
    return lambda key: rename(key) if part in key else key


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        (only("layers.1", infixed("second")), ["''", "'second'", "adapter"]),
        (lambda key: infixed("a" if "layers.0" in key else "b")(key), ["'a'", "'b'", "layers.0", "layers.1"]),
        (only("lora_B", infixed("default")), ["'default'"]),
        (lambda key: key.removesuffix(".weight"), ["lora_A: found", "does not end in .weight"]),
        (only("lora_B", lambda key: key.removesuffix(".weight")), ["lora_B: found", "does not end in .weight"]),
        (only("up_proj", below("")), ["begin with", f"'{PEFT}'", "''"]),
        (
            only("layers.1", below(f"{PEFT}language_model.layers.", instead_of=f"{PEFT}model.layers.")),
            ["layers below 'language_model.' and 'model.'"],
        ),
        (below(f"{PEFT}vision_tower.layers.", instead_of=f"{PEFT}model.layers."), ["vision_tower.layers.0"]),
        (below(f"{PEFT}model.decoder.layers.", instead_of=f"{PEFT}model.layers."), ["model.decoder.layers.0"]),
    ],
)
def test_two_spellings_in_one_file_and_unknown_ones_are_refused(
    tmp_path: Path, rename: Rename, names: list[str]
) -> None:
    source = adapter(tmp_path / "a", rename)
    with pytest.raises(AdapterInvalid) as refused:
        plan_adapter(read_adapter(source), CARD)
    for name in [TENSORS_FILE, *names]:
        assert name in refused.value.message


def test_one_tensor_behind_two_wrappers_is_two() -> None:
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(AdapterInvalid, match=r"a second lora_A of model.layers.0.self_attn.q_proj"):
        pairs_of("file", [key, key.replace("self_attn", "_orig_mod.self_attn")])


def test_rules_are_held_against_the_names_of_the_file(tmp_path: Path) -> None:
    rename = below(f"{PEFT}model.language_model.layers.", instead_of=f"{PEFT}model.layers.")
    config = {"target_modules": r".*language_model.*\.q_proj", "alpha_pattern": {r"model\.language_model\..*": 3}}
    source = renamed(
        write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj"], seed=6, config=config), rename
    )
    plan = plan_adapter(read_adapter(source), CARD)
    assert {part.entry.scale for site in plan.sites for part in site.parts} == {0.75}


@pytest.mark.parametrize("module", ["layers.0.self_attn.q_proj", "language_model.model.layers.0.self_attn.q_proj"])
def test_a_module_is_found_below_the_models_that_hold_it(module: str) -> None:
    place = ModuleIndex(CARD).find(module)
    assert place
    assert place.geometry.parts[place.part].module == "model.layers.0.self_attn.q_proj"


OUTER = make_card("llama", outer=True)


@pytest.mark.parametrize("rename", [lambda key: key, lambda key: re.sub(r"(lora_embedding_.)", r"\1.default", key)])
def test_an_embedding_has_names_of_its_own(tmp_path: Path, rename: Rename) -> None:
    source = renamed(write_peft_adapter(tmp_path / "a", OUTER, rank=4, targets=["embed_tokens"]), rename)
    tensors = {name.split(".")[4]: value for name, value in tensors_of(source).items()}
    a, b = (tensors[f"lora_embedding_{half}"].astype(np.float64) for half in "AB")
    found = ingested_deltas(source, OUTER, tmp_path / "out")
    assert largest_difference(found, {"model.embed_tokens": 2.0 * b @ a}) < 1e-14


def test_the_head_is_a_projection_of_the_layer_after_the_last(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", OUTER, rank=4, targets=["lm_head"])
    (site,) = plan_adapter(read_adapter(source), OUTER).sites
    assert (site.geometry.layer, site.geometry.site) == (2, Site.LM_HEAD)


@pytest.mark.parametrize(
    ("target", "rename", "config", "names"),
    [
        ("embed_tokens", lambda k: k.replace("lora_embedding_A", "lora_A").replace("lora_embedding_B", "lora_B"), {},
         ["embed_tokens.lora_A", "wanted lora_embedding_A"]),
        ("q_proj", lambda k: k.replace("lora_A.weight", "lora_embedding_A"), {}, ["q_proj", "alone", "beside it"]),
        ("lm_head", lambda k: k, {"ensure_weight_tying": True}, ["ensure_weight_tying", "lm_head"]),
        ("embed_tokens", lambda k: k, {"ensure_weight_tying": True}, ["ensure_weight_tying", "embed_tokens"]),
    ],
)  # fmt: skip
def test_what_is_said_of_embedding_and_head_must_be_plain(
    tmp_path: Path, target: str, rename: Rename, config: dict[str, Any], names: list[str]
) -> None:
    source = renamed(write_peft_adapter(tmp_path / "a", OUTER, rank=4, targets=[target], config=config), rename)
    with pytest.raises(AdapterInvalid) as refused:
        plan_adapter(read_adapter(source), OUTER)
    for name in names:
        assert name in refused.value.message


def test_tying_is_harmless_where_neither_is_adapted(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", OUTER, rank=4, targets=["q_proj"], config={"ensure_weight_tying": True})
    assert plan_adapter(read_adapter(source), OUTER).sites


@pytest.mark.parametrize("number", ["01", "\u0663", "-1", "4", "1e0", "{expert}"])
def test_an_expert_has_one_number(number: str) -> None:
    index = ModuleIndex(tiny_cards()["mixtral"])
    assert index.find("model.layers.0.mlp.experts.1.up_proj")
    assert index.find(f"model.layers.0.mlp.experts.{number}.up_proj") is None


@pytest.mark.parametrize("module", ["xlayers.0.self_attn.q_proj", "other.model.layers.0.self_attn.q_proj", "q_proj"])
def test_a_name_that_only_ends_alike_is_not_found(module: str) -> None:
    assert ModuleIndex(CARD).find(module) is None
