"""Experts in three-dimensional tensors: a plane for each, or one for all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.check import plan_adapter
from infinilora.weights.peft import read_adapter
from infinilora.weights.tensorfile import Array
from support.cards import make_card
from support.deltas import Deltas, ingested_deltas, largest_difference, write_source

NUM, HIDDEN, FF, RANK, ALPHA = 4, 32, 24, 2, 5.0
CARD = make_card("qwen3_moe", num_layers=1, num_experts=NUM, intermediate=FF)
BLOCK = "model.layers.0.mlp"
EXPERTS = f"{BLOCK}.experts"
Pairs = dict[str, tuple[Array, Array]]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def source(directory: Path, pairs: Pairs, **config: Any) -> Path:
    targets = sorted({module.rpartition(".")[2] for module in pairs})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    tensors = {}
    for module, (a, b) in pairs.items():
        for half, values in (("A", a), ("B", b)):
            suffix = ".weight" if values.ndim == 2 else ""
            tensors[f"base_model.model.{module}.lora_{half}{suffix}"] = values
    return write_source(directory, settings | config, tensors)


def deltas(pair: tuple[Array, Array], *leaves: str) -> Deltas:
    """Each expert's own product, one after the other, cut into its projections."""
    found = Deltas()
    for expert in range(NUM):
        a = pair[0][expert if len(pair[0]) > 1 else 0].astype(np.float64)
        b = pair[1][expert if len(pair[1]) > 1 else 0].astype(np.float64)
        for leaf, rows in zip(leaves, np.split(ALPHA / RANK * (b @ a), len(leaves)), strict=True):
            found[f"{EXPERTS}.{expert}.{leaf}"] = rows
    return found


GATE_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)


@pytest.mark.parametrize(("num_a", "num_b"), [(NUM, NUM), (1, NUM), (NUM, 1), (1, 1)])
def test_planes_are_those_of_their_experts_or_of_all(tmp_path: Path, num_a: int, num_b: int) -> None:
    gate_up = normal(num_a, RANK, HIDDEN), normal(num_b, 2 * FF, RANK)
    down = normal(num_b, RANK, FF), normal(num_a, HIDDEN, RANK)
    adapter = source(tmp_path / "a", {f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down})
    wanted = deltas(gate_up, *GATE_UP) | deltas(down, *DOWN)
    found = ingested_deltas(adapter, CARD, tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-14


@pytest.mark.parametrize("container", [f"{BLOCK}.experts", BLOCK, BLOCK.replace("mlp", "block_sparse_moe")])
def test_mixtrals_names_mean_gate_down_and_up(tmp_path: Path, container: str) -> None:
    w1, w3 = (normal(NUM, RANK, HIDDEN, seed=s) for s in (1, 3)), (normal(NUM, FF, RANK, seed=s) for s in (4, 5))
    pairs = dict(zip(("w1", "w3"), zip(w1, w3, strict=True), strict=True))
    pairs["w2"] = normal(NUM, RANK, FF), normal(NUM, HIDDEN, RANK)
    adapter = source(tmp_path / "a", {f"{container}.{name}": pair for name, pair in pairs.items()})
    wanted = deltas(pairs["w1"], "gate_proj") | deltas(pairs["w2"], "down_proj") | deltas(pairs["w3"], "up_proj")
    found = ingested_deltas(adapter, CARD, tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) < 1e-14


@pytest.mark.parametrize(
    "pair",
    [
        (normal(NUM - 1, RANK, HIDDEN), normal(NUM, 2 * FF, RANK)),
        (normal(NUM, RANK, HIDDEN), normal(2, 2 * FF, RANK)),
        (normal(NUM, RANK, HIDDEN), normal(NUM, RANK, 2 * FF)),
        (normal(NUM, HIDDEN, RANK), normal(NUM, RANK, 2 * FF)),
        (normal(RANK, HIDDEN), normal(NUM, 2 * FF, RANK)),
        (normal(NUM, RANK + 1, HIDDEN), normal(NUM, 2 * FF, RANK + 1)),
        (normal(NUM, RANK, FF), normal(NUM, HIDDEN, RANK)),
        (normal(NUM * RANK, HIDDEN), normal(2 * FF, RANK * NUM)),
        (normal(1, NUM, RANK, HIDDEN), normal(NUM, 2 * FF, RANK)),
    ],
)
def test_shapes_that_fit_no_layout_are_refused_by_its_name(tmp_path: Path, pair: tuple[Array, Array]) -> None:
    adapter = source(tmp_path / "a", {f"{EXPERTS}.gate_up_proj": pair})
    with pytest.raises(AdapterInvalid) as refused:
        plan_adapter(read_adapter(adapter), CARD)
    for text in [f"{EXPERTS}.gate_up_proj.lora_A", str(list(pair[0].shape)), "stacked expert layout", "rank 2, in 32"]:
        assert text in refused.value.message


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
        {"target_modules": ["experts"]},
        {"target_modules": ["gate_proj", "up_proj"]},
        {"target_modules": None},
    ],
)
def test_targets_may_name_parameter_container_or_projections(tmp_path: Path, config: dict[str, Any]) -> None:
    pair = normal(NUM, RANK, HIDDEN), normal(NUM, 2 * FF, RANK)
    adapter = source(tmp_path / "a", {f"{EXPERTS}.gate_up_proj": pair}, **config)
    assert largest_difference(ingested_deltas(adapter, CARD, tmp_path / "out"), deltas(pair, *GATE_UP)) < 1e-14


def test_a_parameter_that_nothing_targets_is_refused(tmp_path: Path) -> None:
    pair = normal(NUM, RANK, HIDDEN), normal(NUM, 2 * FF, RANK)
    adapter = source(tmp_path / "a", {f"{EXPERTS}.gate_up_proj": pair}, target_modules=["q_proj"])
    with pytest.raises(AdapterInvalid, match=r"experts.gate_up_proj, which adapter_config.json does not target"):
        plan_adapter(read_adapter(adapter), CARD)


def test_planes_beside_an_expert_of_its_own_are_refused(tmp_path: Path) -> None:
    pairs = {
        f"{EXPERTS}.up_proj": (normal(NUM, RANK, HIDDEN), normal(NUM, FF, RANK)),
        f"{EXPERTS}.1.up_proj": (normal(RANK, HIDDEN), normal(FF, RANK)),
    }
    with pytest.raises(AdapterInvalid, match="a second pair for one projection"):
        plan_adapter(read_adapter(source(tmp_path / "a", pairs)), CARD)
