"""Engines that fail, come back, or die in the middle of a stream."""

import asyncio
from pathlib import Path

import pytest

from infinilora.protocol.errors import AdapterFailed, AdapterLoading, InvalidRequest, Overloaded, Unavailable
from support.gateway_house import House, error_of, open_house
from support.scripted_engine import Loss, ScriptedEngine
from support.waiting import eventually

pytestmark = pytest.mark.integration


async def test_another_engine_takes_a_request_that_the_first_could_not(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        for error in (Unavailable("link is gone"), Overloaded("full"), AdapterLoading("soon"), AdapterFailed("lost")):
            house.engines[0].refuse = [error]
            house.engines[1].refuse = []
            answer = await house.complete(max_tokens=2, temperature=0)
            assert answer.status_code == 200, error


async def test_an_error_that_another_engine_would_repeat_is_told_at_once(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        for engine in house.engines:
            engine.refuse = [InvalidRequest("token id 9 is outside")]
        assert (await house.complete()).status_code == 400
        assert sum(len(engine.requests) for engine in house.engines) == 1


async def test_the_same_engine_is_asked_again_within_the_patience(tmp_path: Path) -> None:
    async with open_house(tmp_path, patience_s=5.0) as house:
        house.engine.refuse = [Unavailable("not yet")] * 2
        assert (await house.complete(max_tokens=2)).status_code == 200
        assert len(house.engine.requests) == 3


async def test_a_full_engine_alone_is_the_clients_to_retry(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.engine.refuse = [Overloaded("full", retry_after_s=2)]
        answer = await house.complete()
        assert (answer.status_code, len(house.engine.requests)) == (503, 1)


async def test_scores_of_one_model_never_stand_before_tokens_of_another(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        await house.seed("a1")
        loss = Loss(0, Unavailable("killed"))
        for engine in house.engines:
            engine.loss = loss
        body = {"max_tokens": 2, "echo": True, "logprobs": 0, "lora_fallback": "base"}
        answer = await house.complete("a1", prompt=[5, 6], **body)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")
        assert loss.is_spent


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_stream_goes_on_elsewhere_exactly_where_it_was_lost(tmp_path: Path, temperature: float) -> None:
    async with open_house(tmp_path, engines=2) as house:
        body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 9, "ignore_eos": True, "temperature": temperature}
        body |= {"return_token_ids": True, "echo": True, "logprobs": 0, "seed": 4}
        whole = (await house.http.post("/v1/completions", json=body)).json()["choices"][0]
        loss = Loss(4, Unavailable("killed"))
        for engine in house.engines:
            engine.requests.clear()
            engine.loss = loss
        *chunks, done = await house.stream("/v1/completions", body)
        assert done == "[DONE]"
        assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == whole["token_ids"]
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
        asked = [list(request.token_ids) for engine in house.engines for request in engine.requests]
        assert sorted(len(ids) for ids in asked) == [2, 6]
        assert all(request.num_prompt_tokens == 2 for engine in house.engines for request in engine.requests)


async def test_what_may_be_base_output_is_not_continued_as_an_adapters(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        await house.seed("a1")
        loss = Loss(3, Unavailable("killed"))
        for engine in house.engines:
            engine.loss, engine.degrades = loss, True
        body = {"model": "a1", "prompt": "x", "max_tokens": 9, "lora_fallback": "base"}
        *_, last = await house.stream("/v1/completions", body)
        assert last["error"]["code"] == "unavailable"
        assert sum(len(engine.requests) for engine in house.engines) == 1


async def test_a_stream_without_another_engine_ends_with_an_error_event(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.engine.loss = Loss(3, Unavailable("killed"))
        *chunks, last = await house.stream("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 9})
        assert chunks
        assert last["error"]["code"] == "unavailable"


async def heard(house: House, engine_id: str, address: str) -> None:
    """Wait until the gateway believes this engine to be at this address."""

    def is_there() -> bool:
        return any(m.beat.id == engine_id and m.beat.address == address for m in house.members.all())

    await eventually(is_there, f"{engine_id} at {address}")


async def test_an_engine_that_is_gone_is_noticed_without_its_heartbeat(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        house.engines[0].address = "127.0.0.1:1"  # nobody listens there; its heart beats on
        house.engines[0].incarnation = "next"
        await heard(house, "engine-0", "127.0.0.1:1")
        answers = await asyncio.gather(*(house.complete(max_tokens=1) for _ in range(6)))
        assert [answer.status_code for answer in answers] == [200] * 6
        assert len(house.engines[1].requests) == 6


async def test_an_engine_that_comes_back_during_the_patience_takes_the_request(tmp_path: Path) -> None:
    async with open_house(tmp_path, patience_s=10.0) as house:
        engine = house.engine
        engine.address, engine.incarnation = "127.0.0.1:1", "dead"
        await heard(house, "engine-0", "127.0.0.1:1")
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(house.complete(max_tokens=1))
            reborn = ScriptedEngine(engine.base, engine.model, engine.vocab_size, engine.eos, incarnation="reborn")
            async with reborn.served("a token of the test"):
                house.engines[0].address, house.engines[0].incarnation = reborn.address, "reborn"
                assert (await waiting).status_code == 200
        assert len(reborn.requests) == 1


async def test_a_request_ends_at_its_deadline(tmp_path: Path) -> None:
    async with open_house(tmp_path, request_timeout_s=0.5) as house:
        house.engine.pause_after = 1
        answer = await house.complete(max_tokens=5)
        assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
        await house.until_idle()
