"""Requests off the wire: checked by name and number, read with their defaults; events onto it."""

from typing import Any

import pytest

from infinilora.engine.events import Ended, Failed, Produced, PromptScored
from infinilora.engine.sampler import TokenScore
from infinilora.engine.wire import ModelFacts, read_request, write_event
from infinilora.protocol.errors import AdapterFailed, ContextLengthExceeded, InvalidRequest
from support.engine_process import make_request

FACTS = ModelFacts(vocab_size=100, max_model_len=32, eos_token_ids=frozenset({2}))


def test_zeros_of_the_wire_mean_off() -> None:
    params = read_request(make_request([1], top_p=0.0, repetition_penalty=0.0, logprobs=-1), FACTS).params
    assert (params.top_p, params.repetition_penalty, params.logprobs) == (1.0, 1.0, None)
    assert params.prompt_logprobs == 0


def test_who_names_no_class_is_standard() -> None:
    classes = [read_request(make_request([1], slo_class=said), FACTS).slo_class for said in ("", "batch")]
    assert classes == ["standard", "batch"]


def test_the_models_ends_of_text_stop_unless_ignored() -> None:
    stops: dict[str, Any] = {"stop_token_ids": [9]}
    assert read_request(make_request([1], ignore_eos=False, **stops), FACTS).params.stop_token_ids == {2, 9}
    assert read_request(make_request([1], ignore_eos=True, **stops), FACTS).params.stop_token_ids == {9}


def test_a_continuation_keeps_its_prompt_apart() -> None:
    sequence = read_request(make_request([1, 4], produced=[5, 6]), FACTS)
    assert (sequence.tokens, sequence.num_prompt, sequence.num_produced) == ([1, 4, 5, 6], 2, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": []}, "wanted at least one"),
        ({"prompt": [100]}, "token id 100 is outside the vocabulary of 100"),
        ({"prompt": [1], "produced": [3] * 8}, "8 tokens are produced already"),
        ({"prompt": [1], "temperature": -0.5}, "temperature is -0.5"),
        ({"prompt": [1], "temperature": float("inf")}, "temperature"),
        ({"prompt": [1], "top_p": 1.5}, "top_p"),
        ({"prompt": [1], "min_p": -0.1}, "min_p"),
        ({"prompt": [1], "presence_penalty": 3.0}, "presence_penalty"),
        ({"prompt": [1], "logprobs": 21}, "logprobs is 21; wanted -1 to 20"),
        ({"prompt": [1], "logit_bias": {100: 1.0}}, "logit_bias: token id 100"),
        ({"prompt": [1], "logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"prompt": [1], "stop_token_ids": [400]}, "stop_token_ids: token id 400"),
        ({"prompt": [1], "digest": "latest"}, "not a digest"),
        ({"prompt": [1], "protocol_version": 7}, "protocol version 7"),
        ({"prompt": [1], "slo_class": "urgent"}, "slo_class is 'urgent'; wanted one of interactive, standard, batch"),
    ],
)
def test_what_a_client_got_wrong_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_request(make_request(**options), FACTS)


def test_too_long_names_all_three_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"30 prompt tokens and 8 to produce are 38; .* at most 32"):
        read_request(make_request([1] * 30), FACTS)


def test_events_carry_scores_and_ends_as_they_are() -> None:
    score = TokenScore(7, -0.5, ((7, -0.5), (8, -1.5)))
    token = write_event(Produced(7, score)).token
    assert (token.id, token.logprob, [(t.id, t.logprob) for t in token.top]) == (7, -0.5, [(7, -0.5), (8, -1.5)])
    assert write_event(Produced(7)).token.id == 7
    assert [t.id for t in write_event(PromptScored((score, score))).prompt_logprobs.tokens] == [7, 7]
    ended = Ended("stop", 3, 4, 2, degraded=True, stop_token_id=9)
    finished = write_event(ended).finished
    assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == ("stop", 3, 4)
    assert (finished.cached_tokens, finished.degraded, finished.stop_token_id) == (2, True, 9)
    told = [write_event(e, is_degraded=True).degraded for e in (Produced(7), PromptScored(()), ended)]
    assert told == [True] * 3
    with pytest.raises(AdapterFailed):
        write_event(Failed(AdapterFailed("gone")))
