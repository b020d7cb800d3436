"""Request bodies: what is read, what is refused, and by which name."""

import json
from typing import Any

import pytest

from infinilora.gateway.schema import (
    ChatBody,
    CompletionBody,
    StreamOptions,
    read_body,
    sampling,
    stop_strings,
    with_choice,
)
from infinilora.protocol.errors import InvalidRequest


def completion(**fields: Any) -> CompletionBody:
    return read_body(CompletionBody, json.dumps({"model": "m", "prompt": "p"} | fields).encode())


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        completion(**fields)
    return refused.value


def test_nulls_and_unknown_fields_are_ignored() -> None:
    body = completion(temperature=None, stop=None, metadata={"a": 1}, service_tier="auto")
    assert body.temperature is None


@pytest.mark.parametrize("field", ["lora_adapter", "adapter_id", "lora_path", "lora_request", "adapter", "LoRA"])
def test_fields_that_seem_to_name_an_adapter_are_refused(field: str) -> None:
    error = refusal(**{field: "a1"})
    assert error.param == field
    assert "model" in error.message


def test_a_class_is_one_of_three() -> None:
    assert completion(slo_class="batch").slo_class == "batch"
    error = refusal(slo_class="urgent")
    assert (error.param, "urgent" in error.message) == ("slo_class", True)


@pytest.mark.parametrize("model", [None, 5, ["a"], {}])
def test_a_model_that_is_no_string_is_refused(model: Any) -> None:
    assert refusal(model=model).param == "model"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'model' is missing") as refused:
        read_body(ChatBody, b'{"messages": []}')
    assert refused.value.param == "model"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff"])
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_body(CompletionBody, raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", 0), ("n", 129), ("max_tokens", -1), ("temperature", -0.1), ("temperature", 2.1)),
        *(("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5), ("presence_penalty", 3)),
        *(("repetition_penalty", 0), ("min_tokens", -1), ("stream_options", {}), ("max_tokens", "5")),
        ("lora_fallback", "other"),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    assert refusal(**{field: value}).param == field


def test_stream_options_come_with_a_stream() -> None:
    body = completion(stream=True, stream_options={"include_usage": True})
    assert body.stream_options == StreamOptions(include_usage=True)


def test_stops_are_a_string_or_some() -> None:
    assert stop_strings(completion(stop="x")) == ("x",)
    assert stop_strings(completion(stop=["x", "y"])) == ("x", "y")
    for bad in ("", ["a", ""], ["x"] * 17):
        with pytest.raises(InvalidRequest, match="stop"):
            stop_strings(completion(stop=bad))


def make(body: CompletionBody, **more: Any) -> Any:
    return sampling(body, **{"max_tokens": 5, "vocab_size": 10, "logprobs": -1, "prompt_logprobs": -1} | more)


def test_defaults_are_those_of_openai() -> None:
    made = make(completion())
    assert (made.temperature, made.top_p, made.top_k, made.repetition_penalty) == (1.0, 1.0, 0, 1.0)


def test_seeds_of_choices_follow_one_another() -> None:
    made = make(completion(seed=41))
    assert [with_choice(made, i).seed for i in range(3)] == [41, 42, 43]
    assert make(completion(seed=-1)).seed == (1 << 64) - 1


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    assert make(completion()).seed != make(completion()).seed


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    assert dict(make(completion(logit_bias={"9": 3.0})).logit_bias) == {9: 3.0}
    for bad in (
        {"logit_bias": {"10": 1}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"1": 101}},
        {"stop_token_ids": [-1]},
    ):
        with pytest.raises(InvalidRequest):
            make(completion(**bad))


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"model": "m", "x": ' + b"[" * 100_000])
def test_a_body_nested_without_end_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        read_body(CompletionBody, raw)
