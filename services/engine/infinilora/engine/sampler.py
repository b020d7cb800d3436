"""From logits to tokens: vectorised over rows, and for each row a function of that row alone.

    logits -> bias, penalties, stop ids held back -> / temperature -> top-k -> top-p -> min-p -> inverse CDF

The CDF runs over token ids in ascending order and is cut by one uniform of (seed, token index), in float64.
Log-probabilities are those of the raw logits, before any of this.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infinilora.engine.noise import uniforms
from infinilora.engine.sequence import SamplingParams, Sequence

_FIRST_CUT = 1024
"""Candidates sorted at first for top-p; rows whose mass reaches further are sorted whole."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its log-probability, and the likeliest alternatives (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of a sequence; `score` where the request asked for logprobs."""

    token_id: int
    score: TokenScore | None = None


def sample(logits: Tensor, sequences: Many[Sequence]) -> list[Sampled]:
    """The next token of each sequence; logits fp32 [rows, vocab], row i of sequences[i]. May write into logits."""
    scored = [i for i, s in enumerate(sequences) if s.params.logprobs is not None]
    raw = logits[scored].log_softmax(-1) if scored else None
    for row, sequence in enumerate(sequences):
        if _is_adjusted(sequence):
            _adjust(logits[row], sequence)
    tokens = _choose(logits, sequences).tolist()
    scores: dict[int, TokenScore] = {}
    if raw is not None:
        wanted = [sequences[i].params.logprobs or 0 for i in scored]
        scores = dict(zip(scored, score(raw, [tokens[i] for i in scored], wanted), strict=True))
    return [Sampled(token, scores.get(i)) for i, token in enumerate(tokens)]


def score(logprobs: Tensor, tokens: Many[int], num_top: Many[int]) -> list[TokenScore]:
    """Read the given tokens' log-probabilities, and the `num_top[i]` likeliest, from logprobs [rows, vocab]."""
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    most = min(max(num_top, default=0), logprobs.shape[-1])
    values, ids = logprobs.topk(most, dim=-1)
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenScore(token, logprob, tuple(zip(top_ids[:n], top_values[:n], strict=True)))
        for token, logprob, (top_ids, top_values), n in zip(tokens, chosen, tops, num_top, strict=True)
    ]


def _is_adjusted(sequence: Sequence) -> bool:
    params = sequence.params
    held_back = params.min_tokens > sequence.num_produced and params.stop_token_ids
    return bool(params.logit_bias or params.has_penalties or held_back)


def _adjust(logits: Tensor, sequence: Sequence) -> None:
    """Bias, penalties and held-back stop ids of one row [vocab], in place.

    Repetition looks at prompt and produced tokens, presence and frequency at produced ones only.
    """
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(np.unique(sequence.tokens), device=logits.device)
        at = logits[seen]
        logits[seen] = torch.where(at > 0, at / params.repetition_penalty, at * params.repetition_penalty)
    if sequence.num_produced and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(sequence.tokens[sequence.num_prompt :], return_counts=True)
        weights = params.presence_penalty + params.frequency_penalty * counts
        logits[torch.tensor(ids, device=logits.device)] -= torch.tensor(
            weights, device=logits.device, dtype=logits.dtype
        )
    if params.logit_bias:
        biased, biases = zip(*params.logit_bias, strict=True)
        logits[torch.tensor(biased, device=logits.device)] += torch.tensor(
            biases, device=logits.device, dtype=logits.dtype
        )
    if params.min_tokens > sequence.num_produced and params.stop_token_ids:
        logits[torch.tensor(sorted(params.stop_token_ids), device=logits.device)] = -torch.inf


def _choose(logits: Tensor, sequences: Many[Sequence]) -> Tensor:
    """Token ids int64 [rows]."""
    random = [i for i, s in enumerate(sequences) if s.params.temperature > 0]
    if not random:
        return logits.argmax(-1)
    tokens = logits.argmax(-1)
    plain = [i for i in random if not _is_truncated(sequences[i].params)]
    cut = [i for i in random if _is_truncated(sequences[i].params)]
    if plain:
        tokens[plain] = _draw(_scaled(logits, sequences, plain), None, [sequences[i] for i in plain])
    if cut:
        tokens[cut] = _draw_truncated(_scaled(logits, sequences, cut), [sequences[i] for i in cut])
    return tokens


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _scaled(logits: Tensor, sequences: Many[Sequence], rows: list[int]) -> Tensor:
    temperatures = _column([sequences[i].params.temperature for i in rows], logits.device)
    return logits[rows].double() / temperatures


def _draw(logits: Tensor, ids: Tensor | None, sequences: Many[Sequence]) -> Tensor:
    """Inverse CDF over columns; `ids` [rows, columns] names the columns' tokens, ascending (None: all tokens)."""
    cdf = torch.softmax(logits, -1).cumsum(-1)
    seeds = np.array([s.params.seed for s in sequences], dtype=np.uint64)
    indices = np.array([s.num_produced for s in sequences], dtype=np.uint64)
    targets = torch.from_numpy(uniforms(seeds, indices)).to(cdf.device)[:, None] * cdf[:, -1:]
    columns = torch.searchsorted(cdf, targets, right=True).clamp_(max=cdf.shape[-1] - 1)
    columns = torch.minimum(columns, _last_possible(logits))
    return (columns if ids is None else ids.gather(1, columns))[:, 0]


def _last_possible(logits: Tensor) -> Tensor:
    """The last column [rows, 1] that has a probability: rounding must not carry a draw past it."""
    possible = torch.isfinite(logits)
    return logits.shape[-1] - 1 - possible.flip(-1).int().argmax(-1, keepdim=True)


def _draw_truncated(logits: Tensor, sequences: Many[Sequence]) -> Tensor:
    """Draw among the candidates that top-k, top-p and min-p leave, each applied to what the one before left."""
    vocab = logits.shape[-1]
    top_k = [s.params.top_k or vocab for s in sequences]
    first = min(vocab, max(_FIRST_CUT, *(k for k in top_k if k < vocab), 1))
    values, ids = logits.topk(first, dim=-1)
    if first < vocab and not _mass_suffices(logits, values, sequences, top_k):
        values, ids = logits.sort(-1, descending=True)
    rank = torch.arange(values.shape[-1], device=logits.device)
    values = values.masked_fill(rank >= _column(top_k, logits.device), -torch.inf)
    # A row without top-k takes its probabilities over the whole vocabulary, whatever was sorted.
    total = torch.where(
        _column(top_k, logits.device) >= vocab, logits.logsumexp(-1, keepdim=True), values.logsumexp(-1, keepdim=True)
    )
    probs = (values - total).exp()
    before = probs.cumsum(-1) - probs
    keep = before < _column([s.params.top_p for s in sequences], logits.device)
    keep &= probs >= probs[:, :1] * _column([s.params.min_p for s in sequences], logits.device)
    keep[:, 0] = True
    values = values.masked_fill(~keep, -torch.inf)
    ids, order = ids.sort(-1)
    return _draw(values.gather(1, order), ids, sequences)


def _mass_suffices(logits: Tensor, values: Tensor, sequences: Many[Sequence], top_k: list[int]) -> bool:
    """Whether the candidates already sorted surely hold every one that will be kept."""
    probs = (values - logits.logsumexp(-1, keepdim=True)).exp()
    mass, smallest = probs.sum(-1).tolist(), (probs[:, -1] / probs[:, 0]).tolist()
    return all(
        k <= values.shape[-1] or mass[i] > s.params.top_p or smallest[i] < s.params.min_p
        for i, (s, k) in enumerate(zip(sequences, top_k, strict=True))
    )


def _column(numbers: Many[float], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]
