"""Experts in every layout: one by one under both names, fused, crossed, padded, with unlike scales."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.ingest import ingest, run
from infinilora.weights.peft import TENSORS_FILE
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import Array, open_tensors
from support.cards import make_card, tiny_cards
from support.deltas import Deltas, ingested_deltas, largest_difference, rename_tensors

EXPERTS = "model.layers.0.mlp.experts"
WRAPPED = f"base_model.model.{EXPERTS}"
NUM_EXPERTS, HIDDEN, FF, RANK, ALPHA = 3, 10, 7, 2, 6.0


def card(ff: int = FF) -> BaseCard:
    return make_card("mixtral", num_layers=1, hidden=HIDDEN, intermediate=ff, num_experts=NUM_EXPERTS)


def write_fused(
    directory: Path, pairs: dict[str, tuple[Array, Array]], *, config: dict[str, Any] | None = None
) -> Path:
    directory.mkdir()
    settings = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    (directory / CONFIG_FILE).write_bytes(msgspec.json.encode(settings | (config or {})))
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
    write_tensors(directory / TENSORS_FILE, tensors)
    return directory


def random_pair(in_dim: int, out_dim: int, *, rank: int = RANK, seed: int = 0) -> tuple[Array, Array]:
    dice = np.random.default_rng(seed)
    a = dice.standard_normal((NUM_EXPERTS * rank, in_dim), np.float32)
    return a, dice.standard_normal((out_dim, rank * NUM_EXPERTS), np.float32)


def expert_deltas(pair: tuple[Array, Array], *, crossed: bool = False, rank: int = RANK) -> Array:
    """PEFT's delta of a parameter [E, out, in], in float64: its einsum over the reshaped factors."""
    a = pair[0].astype(np.float64).reshape(NUM_EXPERTS, rank, -1)
    b = pair[1].astype(np.float64).reshape(-1, rank, NUM_EXPERTS)
    delta: Array = ALPHA / rank * np.einsum("ore,eri->eio" if crossed else "ore,eri->eoi", b, a)
    return delta


def by_module(gate_up: Array | None = None, down: Array | None = None, *, ff: int = FF) -> Deltas:
    deltas = Deltas()
    for expert in range(NUM_EXPERTS):
        if gate_up is not None:
            deltas[f"{EXPERTS}.{expert}.gate_proj"] = gate_up[expert, :ff]
            deltas[f"{EXPERTS}.{expert}.up_proj"] = gate_up[expert, ff:]
        if down is not None:
            deltas[f"{EXPERTS}.{expert}.down_proj"] = down[expert]
    return deltas


def test_fused_gate_up_and_down_are_told_apart_by_shape(tmp_path: Path) -> None:
    gate_up, down = random_pair(HIDDEN, 2 * FF), random_pair(FF, HIDDEN, seed=1)
    wanted = by_module(expert_deltas(gate_up), expert_deltas(down))
    for number, (inner, outer) in enumerate([(gate_up, down), (down, gate_up)]):
        source = write_fused(tmp_path / str(number), {f"{WRAPPED}.base_layer": inner, WRAPPED: outer})
        found = ingested_deltas(source, card(), tmp_path / "out")
        assert found.keys() == wanted.keys()
        assert largest_difference(found, wanted) < 1e-14


def test_a_single_fused_parameter_is_enough(tmp_path: Path) -> None:
    down = random_pair(FF, HIDDEN)
    source = write_fused(tmp_path / "a", {WRAPPED: down})
    found = ingested_deltas(source, card(), tmp_path / "out")
    assert largest_difference(found, by_module(down=expert_deltas(down))) < 1e-14


def test_crossed_factors_of_earlier_peft_are_told_by_shape(tmp_path: Path) -> None:
    gate_up, down = random_pair(2 * FF, HIDDEN), random_pair(HIDDEN, FF, seed=1)
    wanted = by_module(expert_deltas(gate_up, crossed=True), expert_deltas(down, crossed=True))
    pairs = {f"{WRAPPED}.base_layer": gate_up, WRAPPED: down}
    source = write_fused(tmp_path / "a", pairs, config={"peft_version": None})
    assert largest_difference(ingested_deltas(source, card(), tmp_path / "out"), wanted) < 1e-14


@pytest.mark.parametrize(
    ("version", "crossed"), [("0.17.1", True), ("0.19.0", True), ("0.19.1", False), ("0.21.2", False)]
)
def test_equal_widths_are_told_by_the_version(tmp_path: Path, version: str, crossed: bool) -> None:
    square = random_pair(HIDDEN, HIDDEN)
    source = write_fused(tmp_path / "a", {WRAPPED: square}, config={"peft_version": version})
    found = ingested_deltas(source, card(HIDDEN // 2), tmp_path / "out")
    wanted = by_module(expert_deltas(square, crossed=crossed), ff=HIDDEN // 2)
    assert largest_difference(found, wanted) < 1e-14
    assert largest_difference(found, by_module(expert_deltas(square, crossed=not crossed), ff=HIDDEN // 2)) > 0.1


@pytest.mark.parametrize("version", [None, "latest"])
def test_equal_widths_without_a_version_are_refused(tmp_path: Path, version: str | None) -> None:
    source = write_fused(tmp_path / "a", {WRAPPED: random_pair(HIDDEN, HIDDEN)}, config={"peft_version": version})
    with pytest.raises(AdapterInvalid, match=r"equal widths 10 and 10.*wanted a peft_version"):
        ingest(source, card(HIDDEN // 2), tmp_path / "out")


def test_a_version_against_the_shapes_of_another_pair_is_refused(tmp_path: Path) -> None:
    pairs = {f"{WRAPPED}.base_layer": random_pair(HIDDEN, HIDDEN), WRAPPED: random_pair(HIDDEN // 2, HIDDEN)}
    straight = write_fused(tmp_path / "a", pairs, config={"peft_version": "0.21.2"})
    assert len(ingest(straight, card(HIDDEN // 2), tmp_path / "out").sites) == 2
    both = write_fused(tmp_path / "b", pairs, config={"peft_version": "0.17.1"})
    with pytest.raises(AdapterInvalid, match=r"until 0\.19\.0, and as it has done since.*wanted one of them"):
        ingest(both, card(HIDDEN // 2), tmp_path / "out")


def test_block_diagonal_gate_up_is_packed_at_its_true_ranks(tmp_path: Path) -> None:
    a, b = random_pair(HIDDEN, 2 * FF, rank=2 * RANK)
    blocks = b.reshape(2 * FF, 2 * RANK, NUM_EXPERTS)
    blocks[:FF, RANK:] = 0
    blocks[FF:, :RANK] = 0
    config = {
        "rank_pattern": {r".*\.gate_up_proj": 2 * RANK},
        "alpha_pattern": {r".*\.gate_up_proj": 2 * ALPHA},
    }
    source = write_fused(tmp_path / "a", {WRAPPED: (a, b)}, config=config)
    manifest = ingest(source, card(), tmp_path / "out")
    assert [(p.name, p.rank, p.scale) for p in manifest.sites[0].parts] == [
        ("gate", RANK, ALPHA / RANK),
        ("up", RANK, ALPHA / RANK),
    ]
    wanted = by_module(2 * expert_deltas((a, b), rank=2 * RANK))
    assert largest_difference(ingested_deltas(source, card(), tmp_path / "out"), wanted) < 1e-14


def test_an_untrained_fused_adapter_is_served_and_adds_nothing(tmp_path: Path) -> None:
    a, b = random_pair(FF, HIDDEN)
    source = write_fused(tmp_path / "a", {WRAPPED: (a, np.zeros_like(b))})
    found = ingested_deltas(source, card(), tmp_path / "out")
    assert found.keys() == by_module(down=expert_deltas((a, b))).keys()
    assert not any(delta.any() for delta in found.values())


@pytest.mark.parametrize(
    ("pair", "config", "message"),
    [
        (random_pair(HIDDEN, FF + 1), {}, r"widths: found in 10, out 8; wanted gate_up_proj \(in 10, out 14\)"),
        (random_pair(FF, HIDDEN, rank=3), {}, r"rows: found 9; wanted 3 experts x rank 2"),
        (random_pair(FF, HIDDEN), {"target_parameters": ["experts.gate_up_proj"]}, r"in target_parameters"),
        ((random_pair(FF, HIDDEN)[0], random_pair(FF, HIDDEN)[1][:, :-1]), {}, r"\[6, 7\] and \[10, 5\]"),
    ],
)
def test_fused_factors_that_do_not_fit_are_refused(
    tmp_path: Path, pair: tuple[Array, Array], config: dict[str, Any], message: str
) -> None:
    source = write_fused(tmp_path / "a", {WRAPPED: pair}, config=config)
    with pytest.raises(AdapterInvalid, match=message):
        ingest(source, card(), tmp_path / "out")


def test_two_fused_pairs_for_one_parameter_are_refused(tmp_path: Path) -> None:
    pair = random_pair(FF, HIDDEN)
    source = write_fused(tmp_path / "a", {WRAPPED: pair, f"{WRAPPED}.base_layer": pair})
    with pytest.raises(AdapterInvalid, match="a second pair"):
        ingest(source, card(), tmp_path / "out")


# One by one ---------------------------------------------------------------------------------------


def test_mixtral_is_read_under_both_generations_of_names(tmp_path: Path) -> None:
    mixtral = tiny_cards()["mixtral"]
    today = write_peft_adapter(tmp_path / "today", mixtral, rank=4, seed=5)
    wanted = ingested_deltas(today, mixtral, tmp_path / "out")
    earlier = write_peft_adapter(tmp_path / "earlier", mixtral, rank=4, seed=5)
    names = {".gate_proj": ".w1", ".up_proj": ".w3", ".down_proj": ".w2", ".mlp.": ".block_sparse_moe."}
    rename_tensors(earlier, names)
    config = msgspec.json.decode((earlier / CONFIG_FILE).read_bytes())
    config["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3", "gate"]
    (earlier / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    found = ingested_deltas(earlier, mixtral, tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert largest_difference(found, wanted) == 0


def test_experts_that_are_not_adapted_are_zeros(tmp_path: Path) -> None:
    mixtral = tiny_cards()["mixtral"]
    source = write_peft_adapter(tmp_path / "a", mixtral, rank=4, targets=["up_proj"])
    whole = ingested_deltas(source, mixtral, tmp_path / "out")
    rename_tensors(source, {}, keep=lambda name: "experts.2." not in name)
    found = ingested_deltas(source, mixtral, tmp_path / "out")
    for module, delta in whole.items():
        assert np.array_equal(found[module], np.zeros_like(delta) if "experts.2." in module else delta)


def test_lower_ranks_and_unlike_scales_of_experts_are_kept(tmp_path: Path) -> None:
    mixtral = tiny_cards()["mixtral"]
    config = {
        "rank_pattern": {r"experts\.1\.down_proj": 3},
        "alpha_pattern": {r"experts\.[12]\.down_proj": 5},
        "use_rslora": True,
    }
    source = write_peft_adapter(tmp_path / "a", mixtral, rank=6, targets=["down_proj"], config=config)
    file = open_tensors(source / TENSORS_FILE)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    for name in tensors:
        if "experts.1." in name:
            tensors[name] = tensors[name][:3] if "lora_A" in name else tensors[name][:, :3]
    write_tensors(source / TENSORS_FILE, tensors)
    wanted = Deltas()
    for layer in range(2):
        for expert in range(4):
            module = f"model.layers.{layer}.mlp.experts.{expert}.down_proj"
            key = f"base_model.model.{module}.lora_"
            a, b = tensors[f"{key}A.weight"].astype(np.float64), tensors[f"{key}B.weight"]
            alpha, rank = 5 if expert in (1, 2) else 12, 3 if expert == 1 else 6
            wanted[module] = alpha / np.sqrt(rank) * (b @ a)
    report = run(source, mixtral, tmp_path / "out", narrow=None, max_rank=64)
    assert [(e.parts[0].rank, e.parts[0].scale) for e in report.manifest.sites] == [(6, 12 / np.sqrt(6))] * 2
    assert report.manifest.dtype == "F32"
    assert any("unlike scales" in warning.text for warning in report.warnings)
    assert largest_difference(ingested_deltas(source, mixtral, tmp_path / "out"), wanted) < 1e-7


def test_a_card_may_name_mixtral_as_its_checkpoint_does(tmp_path: Path) -> None:
    text = msgspec.json.encode(card()).decode()
    for today, earlier in (
        (".mlp.", ".block_sparse_moe."),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
    ):
        text = text.replace(today, earlier)
    checkpoint = msgspec.json.decode(text, type=BaseCard)
    gate_up, down = random_pair(HIDDEN, 2 * FF), random_pair(FF, HIDDEN, seed=1)
    source = write_fused(tmp_path / "a", {f"{WRAPPED}.base_layer": gate_up, WRAPPED: down})
    assert ingest(source, checkpoint, tmp_path / "out").sites == ingest(source, card(), tmp_path / "out").sites
    single = write_peft_adapter(tmp_path / "b", checkpoint, rank=2, targets=["w1", "w2", "gate", "q_proj"], seed=4)
    renamed = write_peft_adapter(
        tmp_path / "c", card(), rank=2, targets=["gate_proj", "down_proj", "gate", "q_proj"], seed=4
    )
    sites = [
        ingest(source, base, tmp_path / "out").sites for source in (single, renamed) for base in (checkpoint, card())
    ]
    assert sites[1:] == sites[:-1]
