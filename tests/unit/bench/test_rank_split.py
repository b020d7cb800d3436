import random

import pytest

from infinilora.bench.rank_split import (
    Experts,
    Step,
    added_bytes,
    break_even,
    kept_share,
    pairs,
    saved_bytes,
    wire_bytes,
)

QWEN3 = Experts(width=2048, expert_width=768, num_experts=128, topk=8)
MIXTRAL = Experts(width=4096, expert_width=14336, num_experts=8, topk=2)


@pytest.mark.parametrize(
    ("experts", "whole", "split", "kept"), [(QWEN3, 45_056, 11_264, 0.2727), (MIXTRAL, 188_416, 17_152, 0.7778)]
)
def test_the_bytes_of_a_token_are_those_of_the_decision(experts: Experts, whole: int, split: int, kept: float) -> None:
    assert wire_bytes(experts, experts.expert_width) == whole
    assert wire_bytes(experts, 64) == split
    assert kept_share(experts) == pytest.approx(kept, abs=1e-4)


@pytest.mark.parametrize(
    ("rows", "adapters", "expected"),
    [
        (1, 1, 8.0),
        (8, 8, 64.0),
        (2, 1, 15.5),  # the second token's eight, of which half a one was there
        (64, 8, 412.96),
        (4096, 1, 128.0),
    ],
)
def test_pairs_of_adapter_and_expert_in_a_step(rows: int, adapters: int, expected: float) -> None:
    assert pairs(QWEN3, Step(rows, adapters, 64)) == pytest.approx(expected, abs=0.1)


def test_the_expected_pairs_are_those_of_tokens_that_draw_their_experts() -> None:
    dice = random.Random(1)
    rounds = [{(a, e) for a in range(4) for _ in range(6) for e in dice.sample(range(128), 8)} for _ in range(300)]
    assert pairs(QWEN3, Step(24, 4, 16)) == pytest.approx(sum(map(len, rounds)) / len(rounds), rel=0.01)


@pytest.mark.parametrize(
    ("step", "saved", "added", "ratio"),
    [
        (Step(1, 1, 64), 33_792, 8 * 294_912, 1 / 69.8),
        (Step(64, 8, 64), 64 * 33_792, 412.96 * 294_912, 1 / 56.3),
        (Step(2048, 1, 64), 2048 * 33_792, 128 * 294_912, 1.83),
        (Step(64, 8, 768), 0, 412.96 * 12 * 294_912, 0.0),
    ],
)
def test_a_split_saves_by_the_row_and_costs_by_the_pair(step: Step, saved: int, added: float, ratio: float) -> None:
    assert saved_bytes(QWEN3, step) == saved
    assert added_bytes(QWEN3, step) == pytest.approx(added, rel=1e-3)
    assert break_even(QWEN3, step) == pytest.approx(ratio, rel=1e-2, abs=1e-9)
