"""Server-sent events: exact order, the same text as without them, errors before and after the first byte."""

import asyncio
import itertools
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from infinilora.protocol.errors import AdapterFailed, Overloaded, Unavailable
from support.gateway_house import House, error_of, events, open_house
from support.scripted_engine import Loss
from support.waiting import eventually

pytestmark = pytest.mark.integration

FOX = "The quick brown 🦊 jumps"


def texts(stream: list[Any], n: int = 1) -> list[str]:
    """The joined text of each choice of a completion or chat stream."""
    joined = [""] * n
    for event in stream:
        for choice in event.get("choices", []) if event != "[DONE]" else []:
            joined[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return joined


def reasons(stream: list[Any]) -> list[str]:
    choices = [c for event in stream if event != "[DONE]" for c in event["choices"]]
    return [c["finish_reason"] for c in choices if c["finish_reason"]]


async def test_a_stream_is_the_answer_in_parts_with_the_adapter_applied(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        digest = await house.seed("a1")
        house.say("base says this")
        house.say(FOX, digest)
        for is_chat, n, logprobs in itertools.product((False, True), (1, 2), (False, True)):
            route = "/v1/chat/completions" if is_chat else "/v1/completions"
            body: dict[str, Any] = {"model": "a1", "temperature": 0, "n": n, "max_tokens": 100}
            body |= {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
            body |= {"logprobs": True if is_chat else 1} if logprobs else {}
            whole = (await house.http.post(route, json=body)).json()
            stream = await house.stream(route, body)
            shown = [c["message"]["content"] if is_chat else c["text"] for c in whole["choices"]]
            assert shown == texts(stream, n) == [FOX] * n
            assert stream[-1] == "[DONE]"
            assert reasons(stream) == ["stop"] * n
        assert {request.digest for request in house.engine.requests} == {digest}


async def test_a_chat_stream_names_the_role_first_and_ends_with_an_empty_delta(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.say("fox")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        *chunks, done = await house.stream("/v1/chat/completions", body)
        assert done == "[DONE]"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["choices"][0]["delta"] == {}
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)


async def test_usage_comes_when_asked_for_and_equals_the_whole_answers(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.say(FOX)
        for more in ({}, {"n": 2}, {"stop": "quick"}):
            body = {"model": "tiny", "prompt": "x", "max_tokens": 100} | more
            whole = (await house.http.post("/v1/completions", json=body)).json()
            for options in (None, {"include_usage": False}):
                chunks = await house.stream("/v1/completions", body | {"stream_options": options})
                assert not any("usage" in chunk for chunk in chunks[:-1])
            asked = body | {"stream_options": {"include_usage": True}}
            *chunks, done = await house.stream("/v1/completions", asked)
            assert done == "[DONE]"
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == whole["usage"]
            assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_stream_options_without_a_stream_are_refused(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        answer = await house.complete(stream_options={"include_usage": True})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "stream_options")


STOPS: list[tuple[Any, str]] = [
    (["own 🦊"], "The quick br"),
    (["\nUser:"], FOX),
    (["x", "quick brown"], "The "),
    ("The", ""),
]


async def test_stop_strings_cut_the_same_in_both(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        ids = house.say(FOX)
        for (stop, text), logprobs in itertools.product(STOPS, (None, 1)):
            body = {"model": "tiny", "prompt": "x", "stop": stop, "logprobs": logprobs, "max_tokens": 200}
            choice = (await house.http.post("/v1/completions", json=body)).json()["choices"][0]
            stream = await house.stream("/v1/completions", body)
            assert choice["text"] == texts(stream)[0] == text
            assert choice["finish_reason"] == "stop" == reasons(stream)[0]
            if logprobs is not None:
                parts = [c["logprobs"] for e in stream if e != "[DONE]" for c in e["choices"]]
                tokens = [token for part in parts for token in part["tokens"]]
                assert tokens == choice["logprobs"]["tokens"]
                assert len(tokens) <= len(ids)


async def test_a_stop_string_cancels_what_is_left(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.engine.pause_after = len(house.say("The quick brown"))
        assert (await house.complete(stop="quick")).json()["choices"][0]["text"] == "The "
        await house.until_idle()
        assert (house.engine.finished, house.engine.cancelled) == (0, 1)


async def test_no_replacement_character_unless_the_budget_cuts_one(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        ids = house.say("日本🦊")
        body = {"model": "tiny", "prompt": "x"}
        assert texts(await house.stream("/v1/completions", body)) == ["日本🦊"]
        cut = body | {"max_tokens": len(ids) - 1}
        whole = (await house.http.post("/v1/completions", json=cut)).json()
        assert [whole["choices"][0]["text"]] == texts(await house.stream("/v1/completions", cut)) == ["日本\ufffd"]


async def test_an_error_before_the_first_token_is_an_ordinary_answer(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        for stream in (False, True):
            house.engine.refuse = [Overloaded("the queue is full", retry_after_s=3.0)]
            answer = await house.complete(stream=stream)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
            assert error_of(answer)["code"] == "overloaded"


async def test_an_error_in_a_stream_is_an_event_and_no_done(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.engine.loss = Loss(3, AdapterFailed("the LoRA server died"))
        *chunks, last = await house.stream("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 9})
        assert len(chunks) >= 1
        assert last["error"]["code"] == "adapter_failed"
        await house.until_idle()


async def test_a_failure_of_one_choice_ends_the_others(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.engine.refuse = [Overloaded("full")]
        answer = await house.complete(n=4, max_tokens=200)
        assert answer.status_code == 503
        await house.until_idle()


async def open_stream(house: House, go: asyncio.Event, **more: Any) -> None:
    """Read one event of a long stream, then leave."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True} | more
    async with house.http.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in events(answer):
            go.set()
            return


async def test_a_client_that_leaves_ends_its_sequences(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.engine.pause_after = 5
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(open_stream(house, asyncio.Event(), n=2))
        await house.until_idle(2.0)
        assert house.engine.cancelled == 32


async def test_a_client_that_reads_nothing_keeps_its_place_no_longer_than_its_request_may_take(tmp_path: Path) -> None:
    async with open_house(tmp_path, socket_bytes=4096, request_timeout_s=3.0) as house:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True}
        data = json.dumps(body | {"logprobs": 20}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", httpx.URL(house.url).port))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            await eventually(lambda: house.gateway.admission.num_running == 1, "it runs")
            await house.until_idle()
        page = (await house.http.get("/metrics")).text
        assert 'infinilora_requests_total{code="deadline_exceeded",route="completions"} 1.0' in page


async def test_a_client_that_leaves_a_whole_answer_ends_it_too(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.engine.pause_after = 1
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(house.complete(max_tokens=100)) for _ in range(8)]
            async with asyncio.timeout(5):
                while house.engine.running < 8:
                    await asyncio.sleep(0.01)
            for task in waiting:
                task.cancel()
        await house.until_idle(2.0)
        assert house.engine.cancelled == 8
        page = (await house.http.get("/metrics")).text
        assert 'infinilora_requests_total{code="client_gone",route="completions"} 8.0' in page


async def test_a_client_that_leaves_before_its_body_is_here_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_house(tmp_path) as house:
        host, _, port = house.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        await asyncio.sleep(0.2)
        assert (await house.complete(max_tokens=1)).status_code == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_nothing_is_cancelled_that_ended_by_itself(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.say(FOX)
        await asyncio.gather(*(house.complete() for _ in range(8)))
        await house.until_idle()
        assert (house.engine.finished, house.engine.cancelled) == (8, 0)


async def test_an_engine_that_emits_its_stop_token_changes_nothing(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.say("fox")
        plain = (await house.complete(logprobs=0, return_token_ids=True)).json()["choices"]
        house.engine.emits_stop_token = True
        assert (await house.complete(logprobs=0, return_token_ids=True)).json()["choices"] == plain


async def test_a_degraded_answer_says_so(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a1")
        house.engine.degrades = True
        strict = await house.complete("a1", max_tokens=2)
        assert "x-infinilora-degraded" not in strict.headers
        loose = await house.complete("a1", max_tokens=2, lora_fallback="base")
        assert loose.headers["x-infinilora-degraded"] == "base"
        assert loose.json()["usage"]["degraded"] == "base"
        assert [request.fallback_base for request in house.engine.requests] == [False, True]


@pytest.mark.parametrize("stop", [None, "fox"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_degraded_answer_says_so_streamed_or_stopped(tmp_path: Path, stream: bool, stop: str | None) -> None:
    async with open_house(tmp_path) as house:
        await house.seed("a1")
        house.say("the fox jumps")
        house.engine.degrades = True
        asked = {"stream": stream, "stop": stop, "lora_fallback": "base"}
        answer = await house.complete("a1", max_tokens=8, **asked)
        assert answer.headers["x-infinilora-degraded"] == "base"
        if stream:
            *chunks, done = [event async for event in events(answer)]
            assert done == "[DONE]"
            assert {chunk["degraded"] for chunk in chunks} == {"base"}
        else:
            assert answer.json()["usage"]["degraded"] == "base"


@pytest.mark.parametrize("after", [0, 2])
async def test_rows_that_a_link_narrowed_are_told_from_where_they_may_matter(tmp_path: Path, after: int) -> None:
    async with open_house(tmp_path) as house:
        house.say("the fox jumps over the fox", await house.seed("a1"))
        house.engine.narrows_after = after
        whole = await house.complete("a1", max_tokens=4, ignore_eos=True)
        assert (whole.headers["x-infinilora-narrow"], whole.json()["usage"]["narrow"]) == ("int8", "int8")
        streamed = await house.complete("a1", max_tokens=4, ignore_eos=True, stream=True)
        assert streamed.headers.get("x-infinilora-narrow") == (None if after else "int8")
        *chunks, _ = [event async for event in events(streamed)]
        told = ["narrow" in chunk for chunk in chunks]
        assert told == sorted(told)
        assert told.count(False) == after
        house.engine.narrows_after = None
        exact = await house.complete("a1", max_tokens=4)
        assert "x-infinilora-narrow" not in exact.headers
        assert "narrow" not in exact.json()["usage"]


async def test_no_engine_is_an_error_that_can_be_retried(tmp_path: Path) -> None:
    async with open_house(tmp_path, patience_s=0.2) as house:
        house.engine.refuse = [Unavailable("not yet")] * 100
        answer = await house.complete()
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert error_of(answer)["code"] == "unavailable"


@pytest.mark.parametrize("n", [1, 2])
async def test_whoever_is_answered_when_a_gateway_ends_is_told(tmp_path: Path, n: int) -> None:
    async with open_house(tmp_path) as house:
        house.engine.pause_after = 2
        body = {"model": "tiny", "prompt": "x", "max_tokens": 9, "n": n, "ignore_eos": True}
        whole = asyncio.create_task(house.http.post("/v1/completions", json=body))
        async with house.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            stream = events(answer)
            await anext(stream)
            await eventually(lambda: house.engine.running == 2 * n, "both run")
            house.gateway.under_way.end()
            *_, last = [event async for event in stream]
        assert last["error"]["code"] == "unavailable"
        told = await whole
        assert (told.status_code, error_of(told)["code"]) == (503, "unavailable")
        assert "retry-after" in told.headers
        await house.until_idle()
        assert house.engine.cancelled == 2 * n
