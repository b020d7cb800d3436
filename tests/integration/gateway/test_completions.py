"""/v1/completions over HTTP, with real gRPC behind it: prompts, choices, logprobs, limits."""

from pathlib import Path
from typing import Any

import pytest

from support.gateway_house import House, error_of, open_house

pytestmark = pytest.mark.integration


async def test_token_ids_in_and_out_of_a_base_without_tokenizer(tmp_path: Path) -> None:
    async with open_house(tmp_path, with_text=False) as house:
        answer = await house.complete(prompt=[5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True)
        body = answer.json()
        assert answer.status_code == 200, body
        request = house.engine.requests[0]
        choice = body["choices"][0]
        assert choice["token_ids"] == [house.engine.foretold(request, i) for i in range(4)]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert list(request.token_ids) == [5, 6, 7]
        assert body["usage"]["total_tokens"] == 7
        assert "x-adapter-digest" not in answer.headers


async def test_a_base_without_tokenizer_labels_tokens_by_id(tmp_path: Path) -> None:
    async with open_house(tmp_path, with_text=False) as house:
        answer = await house.complete(prompt=[5, 6], max_tokens=1, logprobs=0, echo=True)
        logprobs = answer.json()["choices"][0]["logprobs"]
        assert logprobs["tokens"][:2] == ["token_id:5", "token_id:6"]


async def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    async with open_house(tmp_path, with_text=False) as house:
        for extra in ({"prompt": "hello"}, {"prompt": [1], "stop": "x"}):
            answer = await house.complete(**extra)
            assert answer.status_code == 400
            assert "no tokenizer" in error_of(answer)["message"]
        assert not house.engine.requests


async def test_text_is_tokenised_and_detokenised(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.say("jumps over 🦊")
        body = (await house.complete(prompt="the fox ")).json()
        assert body["choices"][0]["text"] == "jumps over 🦊"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert "token_ids" not in body["choices"][0]
        assert list(house.engine.requests[0].token_ids) == house.tokenizer.encode("the fox ").ids  # type: ignore[union-attr]


async def test_a_list_of_prompts_gives_choices_in_order(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for prompt in (["a", "b"], [[5, 6], [7]]):
            body = (await house.complete(prompt=prompt, n=2, max_tokens=3, seed=7, return_token_ids=True)).json()
            assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
            ids = [c["token_ids"] for c in body["choices"]]
            assert ids[0] == ids[2] != ids[1] == ids[3]
            prompts = [len(c["prompt_token_ids"]) for c in body["choices"]]
            assert body["usage"]["prompt_tokens"] == prompts[0] + prompts[2]
            assert body["usage"]["completion_tokens"] == 12


async def test_choices_of_one_seed_are_repeatable_and_can_be_asked_for_alone(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:

        async def texts(**more: Any) -> list[str]:
            body = (await house.complete(max_tokens=5, temperature=0.8, **more)).json()
            return [c["text"] for c in body["choices"]]

        four = await texts(n=4, seed=42)
        assert len(set(four)) == 4
        assert await texts(n=4, seed=42) == four
        assert await texts(seed=44) == four[2:3]


async def test_echo_with_logprobs_scores_the_prompt(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.say(" ran")
        prompt = "the fox"
        answer = await house.complete(prompt=prompt, max_tokens=2, echo=True, logprobs=2, return_token_ids=True)
        choice = answer.json()["choices"][0]
        logprobs, ids = choice["logprobs"], choice["prompt_token_ids"] + choice["token_ids"]
        assert choice["text"].startswith(prompt)
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert {len(items) for items in logprobs.values()} == {len(ids)}
        assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1)
        assert logprobs["top_logprobs"][0] is None
        assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:])
        for label, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(label)


async def test_max_tokens_zero_scores_only(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        body = (await house.complete(prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=1)).json()
        assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0
        assert error_of(await house.complete(max_tokens=0))["param"] == "max_tokens"


EMPTY: list[Any] = ["", [""], [], ["", "x"], [[]], [[5], []]]
NO_PROMPT: list[Any] = [[1.5], [True], [-1], [300], ["a", 1], [[1], "a"], {"a": 1}, 5, None]


async def test_an_empty_prompt_or_none_is_refused_and_hurts_nobody(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for prompt in EMPTY + NO_PROMPT:
            answer = await house.complete(prompt=prompt)
            assert answer.status_code == 400, prompt
            assert error_of(answer)["param"] == "prompt", prompt
        assert not house.engine.requests
        assert (await house.complete(max_tokens=2)).status_code == 200


async def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for extra in ({"best_of": 3}, {"suffix": "x"}, {"logprobs": 21}, {"lora_fallback": "base"}):
            assert error_of(await house.complete(**extra))["param"] == next(iter(extra))


async def test_context_overflow_names_the_numbers(tmp_path: Path) -> None:
    async with open_house(tmp_path, with_text=False) as house:

        async def refusal(length: int, **more: Any) -> dict[str, Any]:
            answer = await house.complete(prompt=[5] * length, **more)
            assert answer.status_code == 400
            error = error_of(answer)
            assert error["code"] == "context_length_exceeded"
            return error

        error = await refusal(8, max_tokens=60)
        assert error["param"] == "max_tokens"
        assert all(number in error["message"] for number in ("64", " 8 ", "60", "68"))
        assert (await refusal(64))["param"] == "prompt"
        assert "100" in (await refusal(100))["message"]
        assert (await refusal(8, max_tokens=1_000_000_000))["param"] == "max_tokens"


async def test_without_max_tokens_the_answer_goes_to_the_limit(tmp_path: Path) -> None:
    async with open_house(tmp_path, with_text=False) as house:
        body = (await house.complete(prompt=[5] * 60)).json()
        assert body["usage"]["completion_tokens"] == 4
        assert body["choices"][0]["finish_reason"] == "length"


async def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with open_house(tmp_path, max_body_mb=1) as house:
        answer = await house.complete(prompt="x" * (2 << 20))
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large"


async def test_the_engine_gets_every_parameter(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        asked: dict[str, Any] = {
            "temperature": 0.5,
            "top_p": 0.75,
            "top_k": 9,
            "min_p": 0.25,
            "seed": 3,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "max_tokens": 4,
            "ignore_eos": True,
        }
        await house.complete(**asked, stop_token_ids=[7], logit_bias={"9": -1}, logprobs=1)
        sampling = house.engine.requests[0].sampling
        assert {name: getattr(sampling, name) for name in asked} == asked
        assert list(sampling.stop_token_ids) == [7]
        assert dict(sampling.logit_bias) == {9: -1.0}
        assert (sampling.logprobs, sampling.prompt_logprobs) == (1, -1)


async def test_over_capacity_says_when_to_come_back(tmp_path: Path) -> None:
    async def refusal(house: House, n: int) -> tuple[int, str]:
        answer = await house.complete(n=n, max_tokens=1)
        assert int(answer.headers["retry-after"]) >= 1
        return answer.status_code, error_of(answer)["code"]

    async with open_house(tmp_path, max_concurrent_requests=2) as house:
        assert await refusal(house, 3) == (503, "overloaded")
    async with open_house(tmp_path, max_tenant_requests=2) as house:
        assert await refusal(house, 3) == (429, "rate_limited")
        assert (await house.complete(n=2, max_tokens=1)).status_code == 200


async def test_answers_carry_the_request_id(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        answer = await house.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}, headers={"x-request-id": "r-1"}
        )
        assert answer.headers["x-request-id"] == "r-1"
        assert answer.json()["id"] == "cmpl-r-1"
        assert house.engine.requests[0].request_id == "r-1"
        refused = await house.http.post("/v1/completions", json={}, headers={"x-request-id": "bad id"})
        assert refused.headers["x-request-id"] != "bad id"
