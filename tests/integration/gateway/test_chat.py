"""/v1/chat/completions: messages, templates, logprobs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from support.gateway_house import error_of, open_house

pytestmark = pytest.mark.integration


async def test_messages_are_rendered_by_the_bases_template(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.say("jumps")
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "and?"},
        ]
        answer = await house.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
        body = answer.json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "jumps", "refusal": None}
        assert body["object"] == "chat.completion"
        assert house.tokenizer is not None
        rendered = house.tokenizer.decode(list(house.engine.requests[0].token_ids), skip_special_tokens=False)
        assert rendered == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe\nfox<|im_end|>\n"
            "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert body["usage"]["prompt_tokens"] == len(house.engine.requests[0].token_ids)


async def test_logprobs_list_each_token_with_its_bytes(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.say("a🦊")
        choice = (await house.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert bytes(b for item in content for b in item["bytes"]).decode() == choice["message"]["content"] == "a🦊"
        assert [len(item["top_logprobs"]) for item in content] == [2] * 5
        assert content[0]["token"] == "a"
        assert content[1]["token"].startswith("bytes:")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "pirate", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 1}, "logprobs"),
]


async def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        good = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        for extra, param in REFUSED:
            answer = await house.http.post("/v1/chat/completions", json=good | extra)
            assert answer.status_code == 400, extra
            assert error_of(answer)["param"].startswith(param), extra
        assert not house.engine.requests
        for extra in ({"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"content": ""}):
            assert (await house.chat(**extra, max_tokens=1)).status_code == 200


def overflow(field: str) -> dict[str, Any]:
    return {field: 1000}


async def test_overflow_names_the_field_that_was_used(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for field in ("max_tokens", "max_completion_tokens"):
            error = error_of(await house.chat(**overflow(field)))
            assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        many = [{"role": "user", "content": "x"}] * (house.card.max_model_len + 1)
        answer = await house.http.post("/v1/chat/completions", json={"model": "tiny", "messages": many})
        assert (error_of(answer)["code"], error_of(answer)["param"]) == ("context_length_exceeded", "messages")


async def test_a_base_without_template_says_so(tmp_path: Path) -> None:
    async with open_house(tmp_path, with_text=False) as house:
        answer = await house.chat()
        assert answer.status_code == 400
        assert "no chat template" in error_of(answer)["message"]


async def test_special_tokens_are_not_added_twice(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.chat(content="x", max_tokens=1)
        ids = list(house.engine.requests[0].token_ids)
        assert ids[0] == 1
        assert ids.count(1) == 2
