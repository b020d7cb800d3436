"""Patterns as each generation of PEFT read them: by the version where there is one, with a warning where none tells."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinilora.protocol.adapter import AdapterWarning
from infinilora.weights.ingest import run
from infinilora.weights.rules import LoraRules, rules_of
from infinilora.weights.synth import write_peft_adapter
from support.cards import make_card
from support.deltas import packed_deltas

CARD = make_card("llama", outer=True)
Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
NAMES = (Q0, Q1, DOWN, "lm_head")
JOINT, LOOSE, TODAY = "0.13.2", "0.14.0", "0.21.2"
DOUBTFUL: dict[str, Any] = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.0.self_attn.q_proj": 2}}
"""An early PEFT held to the rank's key, by which there is no alpha."""
WRITTEN_SINCE_15 = {"trainable_token_indices": None}


def rules(**config: Any) -> LoraRules:
    return rules_of({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]} | config)


@pytest.mark.parametrize(
    ("version", "config", "module", "scale"),
    [
        (TODAY, DOUBTFUL, Q0, 2 / 4),
        (LOOSE, DOUBTFUL, Q0, 2 / 4),
        (JOINT, DOUBTFUL, Q0, 16 / 4),
        ("0.8", DOUBTFUL, Q0, 16 / 4),
        ("0.13.3.dev0", DOUBTFUL, Q0, 16 / 4),
        ("0.15.0", DOUBTFUL, Q0, 2 / 4),
        ("v0.13.2", DOUBTFUL, Q0, 16 / 4),
        (" 0.13.2", DOUBTFUL, Q0, 16 / 4),
        ("0", DOUBTFUL, Q0, 2 / 4),
        ("1.0", DOUBTFUL, Q0, 2 / 4),
        ("unknown", DOUBTFUL, Q0, 2 / 4),
        (None, DOUBTFUL, Q0, 2 / 4),
        (JOINT, DOUBTFUL, DOWN, 16 / 8),
        (JOINT, {"alpha_pattern": {"q_proj": 4}, "rank_pattern": {"q_proj": 2}}, Q0, 4 / 2),
        (JOINT, {"alpha_pattern": {"q_proj": 4}, "rank_pattern": {"down_proj": 2}}, Q0, 4 / 8),
        (TODAY, {"alpha_pattern": {"k_proj|q_proj": 4}}, Q0, 4 / 8),
        (LOOSE, {"alpha_pattern": {"k_proj|q_proj": 4}}, Q0, 16 / 8),
        (LOOSE, {"alpha_pattern": {"q_proj|k_proj": 4}}, Q0, 4 / 8),
        (TODAY, {"alpha_pattern": {f"^{Q0}": 4}}, Q0, 4 / 8),
        (LOOSE, {"alpha_pattern": {f"^{Q0}": 4}}, Q0, 16 / 8),
        (LOOSE, {"alpha_pattern": {Q0: 4}}, Q0, 4 / 8),
        (LOOSE, {"alpha_pattern": {"q_proj": 2, Q0: 4}}, Q0, 2 / 8),
        (LOOSE, {"alpha_pattern": {Q0: 4, "q_proj": 2}}, Q0, 2 / 8),
        (LOOSE, {"alpha_pattern": {"lm_head": 4}}, "lm_head", 4 / 8),
        (TODAY, {"alpha_pattern": {"": 4}}, Q0, 16 / 8),
    ],
)
def test_a_version_reads_patterns_as_it_did(
    version: str | None, config: dict[str, Any], module: str, scale: float
) -> None:
    assert rules(**config, peft_version=version).scale(module) == scale


def key_of(form: str, keys: list[str], name: str) -> str:
    return next((key for key in keys if re.match(form.replace("KEY", key), name)), name)


def as_written(version: str, ranks: dict[str, int], alphas: dict[str, float], name: str) -> tuple[int, float]:
    """Rank and scale by what the sources of 0.13.2, 0.14.0 and 0.15.0 do, in their words' order."""
    form = r"(.*\.)?(KEY)$" if version == TODAY else r".*\.KEY$"
    if version == JOINT:
        both = key_of(form, [*ranks, *alphas], name)
        rank, alpha = ranks.get(both, 8), alphas.get(both, 16)
    else:
        rank, alpha = ranks.get(key_of(form, [*ranks], name), 8), alphas.get(key_of(form, [*alphas], name), 16)
    return rank, alpha / rank


PATTERNS = ["q_proj", "layers.0.self_attn.q_proj", r"layers\.0\..*", "down_proj|q_proj", Q1, f"^{Q0}", "lm_head", ".*"]
PAIRS = [dict(zip(keys, (2, 4), strict=True)) for keys in itertools.permutations(PATTERNS, 2)]


@pytest.mark.parametrize("version", [JOINT, LOOSE, TODAY])
def test_every_two_patterns_are_read_as_the_version_did(version: str) -> None:
    for ranks, alphas in itertools.product(PAIRS, PAIRS[::7]):
        asked = rules(rank_pattern=ranks, alpha_pattern=alphas, peft_version=version)
        for name in NAMES:
            wanted = as_written(version, ranks, dict(alphas), name)
            assert (asked.rank(name), asked.scale(name)) == wanted, (ranks, alphas, name)


def doubts(**config: Any) -> tuple[AdapterWarning, ...]:
    return rules(**config).doubts(NAMES)


def test_a_doubt_is_told_where_and_only_where_readings_differ_in_scale_alone() -> None:
    """A reading that gives a tensor another rank is ruled out by the tensor: then the file is of another time."""
    told = silent = 0
    for ranks, alphas in itertools.product(PAIRS, PAIRS[::7]):
        ours = [as_written(TODAY, ranks, dict(alphas), name) for name in NAMES]
        others = [[as_written(version, ranks, dict(alphas), name) for name in NAMES] for version in (JOINT, LOOSE)]
        is_open = any(
            [rank for rank, _ in ours] == [rank for rank, _ in theirs] and ours != theirs for theirs in others
        )
        assert bool(doubts(rank_pattern=ranks, alpha_pattern=alphas)) == is_open, (ranks, alphas)
        told, silent = told + is_open, silent + (not is_open)
    assert min(told, silent) > 100


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"peft_version": TODAY},
        {"peft_version": JOINT},
        {"peft_version": None},
        WRITTEN_SINCE_15,
        {"exclude_modules": None},  # of 0.14 on: one reading for ranks and alphas apart
        {"alpha_pattern": {"q_proj": 2}},
        {"rank_pattern": {}},
    ],
)
def test_there_is_no_doubt_where_the_file_tells(config: dict[str, Any]) -> None:
    assert bool(doubts(**DOUBTFUL | config)) == (not config)


def test_a_key_of_0_14_leaves_the_doubt_about_its_form() -> None:
    (doubt,) = doubts(alpha_pattern={"k_proj|q_proj": 4}, exclude_modules=None)
    assert "PEFT of 0.14" in doubt.text
    assert not doubts(alpha_pattern={"k_proj|q_proj": 4}, **WRITTEN_SINCE_15)


def test_a_pattern_that_no_early_peft_could_compile_raises_no_doubt() -> None:
    assert not doubts(alpha_pattern={"a)|(q_proj": 4})


def test_a_doubt_is_kept_with_the_modules_and_both_scales(tmp_path: Path) -> None:
    source = write_peft_adapter(tmp_path / "a", CARD, rank=4, targets=["q_proj"], config={"r": 4, **DOUBTFUL})
    report = run(source, CARD, tmp_path / "out", narrow=None, max_rank=64)
    (warning,) = report.warnings
    assert (warning.code, warning.count) == ("patterns_in_doubt", 1)
    assert f"{Q0}: 0.5, not 2" in warning.text
    assert "no peft_version" in warning.text


@pytest.mark.parametrize(
    ("version", "patterns"),
    [
        (JOINT, DOUBTFUL),
        ("v0.13.0", DOUBTFUL),
        (LOOSE, {"alpha_pattern": {"k_proj|layers.0.self_attn.q_proj": 2}}),
        (LOOSE, {"alpha_pattern": {f"^{Q0}": 2}}),
    ],
)
def test_an_early_version_is_served_by_its_own_reading(version: str, patterns: dict[str, Any], tmp_path: Path) -> None:
    deltas = []
    for known in (version, TODAY):
        where, config = tmp_path / known, {"r": 4, "lora_alpha": 16, "peft_version": known, **patterns}
        source = write_peft_adapter(where, CARD, rank=4, targets=["q_proj"], config=config)
        report = run(source, CARD, where / "out", narrow=None, max_rank=64)
        assert report.warnings == ()
        deltas.append(packed_deltas(where / "out", CARD))
    early, today = deltas
    assert np.allclose(early[Q0], 8 * today[Q0], rtol=1e-12, atol=0)
    assert np.array_equal(early[Q1], today[Q1])
