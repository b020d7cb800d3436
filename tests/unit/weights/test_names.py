"""The names that trainers give to one and the same tensor."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.check import plan_adapter
from infinilora.weights.keys import pairs_of
from infinilora.weights.names import ModuleIndex
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import open_tensors
from support.cards import tiny_cards
from support.deltas import largest_difference, planned_deltas

CARD = tiny_cards()["llama"]
PEFT = "base_model.model."
Rename = Callable[[str], str]


def renamed(directory: Path, rename: Rename) -> Path:
    file = open_tensors(directory / TENSORS_FILE)
    write_tensors(directory / TENSORS_FILE, {rename(name): np.array(file.read(name)) for name in file.tensors})
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
        lambda key: key.removesuffix(".weight"),
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
    wanted = planned_deltas(adapter(tmp_path / "plain"), CARD, tmp_path / "out")
    found = planned_deltas(adapter(tmp_path / "other", rename), CARD, tmp_path / "out")
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


@pytest.mark.parametrize("module", ["xlayers.0.self_attn.q_proj", "other.model.layers.0.self_attn.q_proj", "q_proj"])
def test_a_name_that_only_ends_alike_is_not_found(module: str) -> None:
    assert ModuleIndex(CARD).find(module) is None
