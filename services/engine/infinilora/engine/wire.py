"""Between `generate.proto` and the engine's own words: requests checked and read, events written.

Everything a client can get wrong is refused here, by name and number, before a sequence exists.
"""

import math
from dataclasses import dataclass
from typing import Any, get_args

from infinilora.engine.events import Ended, Event, Failed, Produced, PromptScored
from infinilora.engine.sampler import TokenScore
from infinilora.engine.sequence import SamplingParams, Sequence
from infinilora.protocol import generate_pb2 as pb
from infinilora.protocol.errors import ContextLengthExceeded, InvalidRequest
from infinilora.protocol.ids import PROTOCOL_VERSION, SloClass, parse_digest

SLO_CLASSES: tuple[SloClass, ...] = get_args(SloClass)
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 20

Message = Any
"""A protobuf message of generate.proto."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request is checked against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


def read_request(request: Message, facts: ModelFacts) -> Sequence:
    """A sequence from a `GenerateRequest`. InvalidRequest or ContextLengthExceeded say what was wrong."""
    if request.protocol_version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        raise InvalidRequest(f"protocol version {request.protocol_version}; this engine speaks {PROTOCOL_VERSION}")
    tokens, num_prompt = list(request.token_ids), request.num_prompt_tokens
    params = _sampling(request.sampling, facts)
    _check_tokens(tokens, num_prompt, params, facts)
    return Sequence(
        request_id=request.request_id,
        tokens=tokens,
        num_prompt=num_prompt,
        digest=parse_digest(request.digest) if request.digest else None,
        params=params,
        fallback_base=request.fallback_base,
        slo_class=_slo_class(request.slo_class),
    )


def _slo_class(said: str) -> SloClass:
    """The class that a request says; who says nothing is `standard`."""
    for known in SLO_CLASSES:
        if known == (said or "standard"):
            return known
    raise InvalidRequest(f"slo_class is {said[:40]!r}; wanted one of {', '.join(SLO_CLASSES)}", param="slo_class")


def _check_tokens(tokens: list[int], num_prompt: int, params: SamplingParams, facts: ModelFacts) -> None:
    if not 0 < num_prompt <= len(tokens):
        raise InvalidRequest(
            f"the prompt is {num_prompt} of {len(tokens)} tokens; wanted at least one, and no more than there are",
            param="prompt",
        )
    if (worst := max(tokens)) >= facts.vocab_size:
        raise InvalidRequest(f"token id {worst} is outside the vocabulary of {facts.vocab_size}", param="prompt")
    produced = len(tokens) - num_prompt
    if produced and produced >= params.max_tokens:
        raise InvalidRequest(f"{produced} tokens are produced already; max_tokens is {params.max_tokens}")
    if num_prompt + params.max_tokens > facts.max_model_len:
        raise ContextLengthExceeded(
            f"{num_prompt} prompt tokens and {params.max_tokens} to produce are "
            f"{num_prompt + params.max_tokens}; this model serves at most {facts.max_model_len}",
            param="max_tokens",
        )


def _sampling(sampling: Message, facts: ModelFacts) -> SamplingParams:
    _check_range("temperature", sampling.temperature, 0.0, 100.0)
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.0, 100.0)
    _check_range("logprobs", sampling.logprobs, -1, MAX_LOGPROBS)
    _check_range("prompt_logprobs", sampling.prompt_logprobs, -1, MAX_PROMPT_LOGPROBS)
    bias = tuple(sorted(sampling.logit_bias.items()))
    for token, value in bias:
        _check_range("logit_bias", value, -100.0, 100.0)
        _check_token("logit_bias", token, facts)
    for token in sampling.stop_token_ids:
        _check_token("stop_token_ids", token, facts)
    stops = frozenset(sampling.stop_token_ids)
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        seed=sampling.seed,
        stop_token_ids=stops if sampling.ignore_eos else stops | facts.eos_token_ids,
        min_tokens=sampling.min_tokens,
        logprobs=None if sampling.logprobs < 0 else sampling.logprobs,
        prompt_logprobs=None if sampling.prompt_logprobs < 0 else sampling.prompt_logprobs,
        logit_bias=bias,
    )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; wanted {low} to {high}", param=name)


def _check_token(name: str, token: int, facts: ModelFacts) -> None:
    if token >= facts.vocab_size:
        raise InvalidRequest(f"{name}: token id {token} is outside the vocabulary of {facts.vocab_size}", param=name)


def write_event(event: Event, *, is_degraded: bool = False) -> Message:
    """A `GenerateEvent`. Raises the error of `Failed`: that is how it crosses gRPC."""
    match event:
        case Produced(token_id, score):
            token = pb.Token(id=token_id) if score is None else _token(score)
            return pb.GenerateEvent(token=token, degraded=is_degraded)
        case PromptScored(scores):
            prompt = pb.PromptLogprobs(tokens=[_token(s) for s in scores])
            return pb.GenerateEvent(prompt_logprobs=prompt, degraded=is_degraded)
        case Ended():
            return pb.GenerateEvent(finished=_finished(event), degraded=event.degraded)
        case Failed(error):
            raise error


def _token(score: TokenScore) -> Message:
    top = [pb.TokenLogprob(id=token, logprob=logprob) for token, logprob in score.top]
    return pb.Token(id=score.token_id, logprob=score.logprob, top=top)


def _finished(event: Ended) -> Message:
    return pb.Finished(
        reason=event.reason,
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        cached_tokens=event.cached_tokens,
        degraded=event.degraded,
        stop_token_id=event.stop_token_id or 0,
    )
