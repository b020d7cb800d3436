"""Request bodies: what is read, what is refused, and by which name."""

import json
from typing import Any

import pytest

from infinilora.gateway.schema import (
    Body,
    ChatBody,
    CompletionBody,
    StreamOptions,
    read_body,
    sampling,
    stop_strings,
    with_choice,
)
from infinilora.gateway.unserved import refuse_query
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
        *(("repetition_penalty", 1e-38), ("lora_fallback", "other")),
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


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("guided_json", {"type": "object"}), ("structured_outputs", {"regex": "a"}), ("bad_words", ["a"])),
        *(("add_generation_prompt", False), ("length_penalty", 2.0), ("modalities", ["text", "audio"])),
        *(("max_new_tokens", 3), ("extra_body", {"lora": "a1"})),
    ],
)
def test_what_would_make_another_answer_is_not_ignored(kind: type[Body], field: str, value: Any) -> None:
    own: dict[str, Any] = {"prompt": "p"} if kind is CompletionBody else {"messages": []}
    with pytest.raises(InvalidRequest) as refused:
        read_body(kind, json.dumps({"model": "m", field: value} | own).encode())
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("tools", [{}]), ("messages", [{}]), ("max_completion_tokens", 5), ("top_logprobs", 0)),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_a_field_of_the_other_route_is_not_ignored(field: str, value: Any) -> None:
    assert refusal(**{field: value}).param == field


def test_fields_that_are_not_served_may_be_sent_where_they_mean_nothing() -> None:
    completion(
        **dict.fromkeys(("guided_json", "messages", "top_logprobs", "add_generation_prompt")),
        use_beam_search=False,
        length_penalty=1.0,
        tool_choice="none",
        tools=[],
        no_repeat_ngram_size=0,
        response_format={"type": "text"},
    )


@pytest.mark.parametrize("key", ["", "+1", " 1", "1_0", "01", "-1", "1.0", "\u0661", "9" * 5000])
def test_a_bias_is_of_a_token_in_one_spelling(key: str) -> None:
    body = completion(logit_bias={key: 5.0})
    with pytest.raises(InvalidRequest) as refused:
        sampling(body, max_tokens=4, vocab_size=100, logprobs=-1, prompt_logprobs=-1)
    assert refused.value.param == "logit_bias"


def test_a_top_p_of_next_to_nothing_is_not_read_as_off() -> None:
    body = completion(top_p=1e-50)
    assert 0 < sampling(body, max_tokens=4, vocab_size=100, logprobs=-1, prompt_logprobs=-1).top_p < 1e-30


def test_a_field_deep_in_a_body_is_named_where_it_is_missing() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_body(ChatBody, b'{"model": "m", "messages": [{"role": "user"}, {"content": "x"}]}')
    assert refused.value.param == "messages[1].role"


@pytest.mark.parametrize("name", ["lora", "Adapter_id", "model", "MODEL"])
def test_a_query_that_seems_to_name_a_model_is_refused(name: str) -> None:
    refuse_query(["api-version", "stream"])
    with pytest.raises(InvalidRequest) as refused:
        refuse_query(["api-version", name])
    assert refused.value.param == name
