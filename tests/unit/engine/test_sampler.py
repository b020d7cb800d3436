"""Sampling: each rule against its definition, each row alone, noise from (seed, index) only."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinilora.engine.noise import uniforms
from infinilora.engine.sampler import sample
from infinilora.engine.sequence import SamplingParams, Sequence

VOCAB = 50


def sequence(prompt: list[int] | None = None, produced: list[int] | None = None, **params: Any) -> Sequence:
    prompt = prompt or [1, 2]
    return Sequence("s", prompt + (produced or []), len(prompt), params=SamplingParams(**params))


def logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def token(scores: Tensor, s: Sequence) -> int:
    return sample(scores.clone(), [s])[0].token_id


def by_definition(scores: Tensor, params: SamplingParams, u: float) -> int:
    """Temperature, top-k, top-p, min-p and the inverse CDF over ascending ids, one token at a time in float64."""
    scaled = [float(v) / params.temperature for v in scores.double()]
    kept = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))[: params.top_k or None]
    top = max(scaled)
    weights = {i: math.exp(scaled[i] - top) for i in kept}
    left: list[int] = []
    total, mass = sum(weights.values()), 0.0
    for i in kept:
        if left and mass >= params.top_p * total:
            break
        left.append(i)
        mass += weights[i]
    left = [i for i in left if weights[i] >= params.min_p * weights[kept[0]]]
    target, cumulated = u * sum(weights[i] for i in left), 0.0
    for i in sorted(left):
        cumulated += weights[i]
        if cumulated > target:
            return i
    return sorted(left)[-1]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 5),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 49, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
)
def test_random_choice_equals_its_definition(
    seed: int, index: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores = logits(seed=seed % 1000)[0]
    s = sequence(
        produced=[3] * index, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=9
    )
    u = float(uniforms(np.array([seed], np.uint64), np.array([index], np.uint64))[0])
    assert token(scores[None], s) == by_definition(scores, s.params, u)


def test_top_p_looks_beyond_the_first_cut_when_the_mass_is_spread() -> None:
    flat = logits(vocab=5000, scale=0.001)
    wide = [token(flat, sequence(temperature=1.0, top_p=0.99, seed=i)) for i in range(300)]
    order = flat[0].argsort(descending=True).tolist()
    assert max(order.index(t) for t in wide) > 1024
    assert token(flat, sequence(temperature=1.0, top_p=0.99, seed=7)) == by_definition(
        flat[0],
        SamplingParams(temperature=1.0, top_p=0.99),
        float(uniforms(np.array([7], np.uint64), np.array([0], np.uint64))[0]),
    )


def test_a_row_is_chosen_alike_alone_and_among_others() -> None:
    scores = logits(rows=6, seed=3)
    rows = [
        sequence(),
        sequence(temperature=1.0, seed=5),
        sequence(temperature=0.8, top_p=0.7, seed=6),
        sequence(temperature=1.3, top_k=4, seed=7, logprobs=2),
        sequence([4, 5], [6, 6], repetition_penalty=1.5, presence_penalty=0.5, max_tokens=5),
        sequence(temperature=1.0, min_p=0.2, seed=9, logit_bias=((7, 5.0),)),
    ]
    together = sample(scores.clone(), rows)
    alone = [sample(scores[i : i + 1].clone(), [s])[0] for i, s in enumerate(rows)]
    assert [t.token_id for t in together] == [t.token_id for t in alone]
    assert together[3].score == alone[3].score


def test_noise_is_a_function_of_seed_and_index_and_looks_uniform() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 50)
    indices = np.tile(np.arange(50, dtype=np.uint64), 200)
    values = uniforms(seeds, indices)
    assert np.array_equal(values, uniforms(seeds, indices))
    assert len(set(values.tolist())) == len(values)
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert abs(counts - 1000).max() < 150
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05


def test_frequencies_follow_the_probabilities() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0]])
    counts = np.bincount([token(scores, sequence(temperature=1.0, seed=i)) for i in range(3000)], minlength=3)
    expected = torch.softmax(scores[0], -1).numpy() * 3000
    assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_greedy_takes_the_likeliest() -> None:
    scores = logits(rows=4, seed=8)
    assert [t.token_id for t in sample(scores.clone(), [sequence()] * 4)] == scores.argmax(-1).tolist()


def test_repetition_penalty_weakens_prompt_and_produced_tokens_whatever_their_sign() -> None:
    scores = torch.full((1, 6), -9.0)
    scores[0, :4] = torch.tensor([3.0, -1.0, 1.6, -0.6])
    assert token(scores, sequence([0, 5], repetition_penalty=2.0)) == 2
    scores[0, 2] = -9.0
    scores[0, 0] = -9.0
    assert token(scores, sequence([5], [1], repetition_penalty=2.0, max_tokens=9)) == 3
    assert token(scores, sequence([5], [3], repetition_penalty=2.0, max_tokens=9)) == 1


def test_presence_and_frequency_penalties_see_produced_tokens_only() -> None:
    scores = torch.tensor([[1.0, 0.9, 0.0]])
    assert token(scores, sequence([0, 0], presence_penalty=0.5)) == 0
    assert token(scores, sequence([2], [0], presence_penalty=0.5, max_tokens=9)) == 1
    assert token(scores, sequence([2], [0], frequency_penalty=0.05, max_tokens=9)) == 0
    assert token(scores, sequence([2], [0, 0, 0], frequency_penalty=0.05, max_tokens=9)) == 1


def test_bias_can_force_and_forbid() -> None:
    scores = logits()
    assert token(scores, sequence(logit_bias=((17, 100.0),))) == 17
    best = int(scores.argmax())
    assert token(scores, sequence(logit_bias=((best, -100.0),))) != best


def test_stop_ids_are_held_back_until_min_tokens() -> None:
    scores = torch.tensor([[5.0, 1.0, 0.0]])
    stops = frozenset({0})
    assert token(scores, sequence(min_tokens=2, stop_token_ids=stops)) == 1
    assert token(scores, sequence([1], [2], min_tokens=2, stop_token_ids=stops, max_tokens=9)) == 1
    assert token(scores, sequence([1], [2, 2], min_tokens=2, stop_token_ids=stops, max_tokens=9)) == 0
    assert token(scores, sequence(min_tokens=2, stop_token_ids=stops, temperature=1.0, seed=3)) != 0


def test_logprobs_are_those_of_the_raw_logits() -> None:
    scores = logits(seed=4)
    raw = scores[0].log_softmax(-1)
    s = sequence(temperature=0.5, top_k=3, seed=2, logit_bias=((3, 50.0),), logprobs=4)
    sampled = sample(scores.clone(), [s])[0]
    assert sampled.token_id == 3
    assert sampled.score is not None
    assert sampled.score.logprob == pytest.approx(float(raw[3]), abs=1e-6)
    values, ids = raw.topk(4)
    assert [t for t, _ in sampled.score.top] == ids.tolist()
    assert [v for _, v in sampled.score.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_rows_may_ask_for_different_numbers_of_logprobs() -> None:
    scores = logits(rows=3, seed=5)
    results = sample(scores, [sequence(logprobs=0), sequence(), sequence(logprobs=3)])
    assert [None if r.score is None else len(r.score.top) for r in results] == [0, None, 3]
