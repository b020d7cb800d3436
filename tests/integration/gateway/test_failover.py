"""Engines that fail, come back, or die in the middle of a stream."""

import asyncio
from pathlib import Path

import pytest

from infinilora.protocol.control import EngineLoad
from infinilora.protocol.errors import AdapterFailed, AdapterLoading, InvalidRequest, Overloaded, Unavailable
from infinilora.runtime.membership import Member
from support.gateway_house import House, error_of, open_house
from support.scripted_engine import Loss, ScriptedEngine
from support.waiting import eventually

pytestmark = pytest.mark.integration

LONG_BODY = {"model": "tiny", "prompt": "x", "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}


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
        first, second = house.engines
        first.loss, second.degrades = Loss(0, Unavailable("killed")), True
        body = {"max_tokens": 2, "echo": True, "logprobs": 0, "lora_fallback": "base", "return_token_ids": True}
        answer = await house.complete("a1", prompt=[5, 6], **body)
        (asked,) = second.requests
        assert (asked.fallback_base, asked.sampling.prompt_logprobs) == (False, -1)
        made = [second.foretold(asked, index) for index in range(2)]
        assert answer.json()["choices"][0]["token_ids"] == made
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 4
        assert "x-infinilora-degraded" not in answer.headers


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


async def test_base_output_in_an_adapters_place_goes_on_as_base_output_and_says_so(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        await house.seed("a1")
        loss = Loss(3, Unavailable("killed"))
        for engine in house.engines:
            engine.loss, engine.degrades = loss, True
        body = {"model": "a1", "prompt": "x", "max_tokens": 9, "lora_fallback": "base", "ignore_eos": True, "seed": 1}
        *chunks, done = await house.stream("/v1/completions", body | {"return_token_ids": True})
        assert done == "[DONE]"
        assert all(chunk["degraded"] == "base" for chunk in chunks)
        first, second = (engine.requests for engine in house.engines)
        assert (second[0].digest, second[0].fallback_base) == ("", False)
        wanted = [house.engine.foretold(first[0], index) for index in range(9)]
        assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == wanted


async def test_an_engine_that_gives_a_stream_up_as_it_stops_has_lost_it(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        house.engine.gives_up_after = 2
        *chunks, done = await house.stream("/v1/completions", LONG_BODY)
        assert done == "[DONE]"
        assert sum(len(c["choices"][0]["token_ids"]) for c in chunks) == 9


async def test_a_stream_waits_for_the_only_engine_to_come_back(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.engine.loss = Loss(3, Unavailable("killed"))
        house.engine.refuse_later = [Unavailable("not yet"), Overloaded("full")]
        *chunks, done = await house.stream("/v1/completions", LONG_BODY)
        assert done == "[DONE]"
        assert sum(len(c["choices"][0]["token_ids"]) for c in chunks) == 9
        assert [len(request.token_ids) - request.num_prompt_tokens for request in house.engine.requests] == [0, 3, 3, 3]


async def test_a_stream_that_no_engine_goes_on_with_ends_with_an_error_event(tmp_path: Path) -> None:
    async with open_house(tmp_path, patience_s=0.3) as house:
        house.engine.loss = Loss(3, Unavailable("killed"))
        house.engine.refuse_later = [Overloaded("full")] * 9
        *chunks, last = await house.stream("/v1/completions", LONG_BODY)
        assert sum(len(c["choices"][0]["token_ids"]) for c in chunks) == 3
        assert last["error"]["code"] == "overloaded"


async def test_a_draining_engine_gets_nothing_new_and_ends_what_it_runs(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        first, second = house.engines
        first.pause_after = 2
        running = asyncio.create_task(house.stream("/v1/completions", LONG_BODY))
        await eventually(lambda: first.running == 1, "a stream")
        first.state = "draining"
        await eventually(lambda: any(m.beat.state == "draining" for m in house.members.all()), "the drain to be heard")
        for _ in range(3):
            assert (await house.complete(max_tokens=1)).status_code == 200
        first.go.set()
        *_, done = await running
        assert done == "[DONE]"
        assert (len(first.requests), first.finished, len(second.requests)) == (1, 1, 3)


async def test_a_prompt_goes_where_its_beginning_was_computed(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        first, second = house.engines
        first.pause_after = 1
        busy = asyncio.create_task(house.complete(max_tokens=2))
        await eventually(lambda: first.running == 1, "a busy engine")
        prompt = list(range(3, 203))
        await house.complete(prompt=prompt, max_tokens=1)
        first.go.set()
        await busy
        await idle_beats(house)
        for more in range(3):
            await house.complete(prompt=[*prompt, 7 + more], max_tokens=1)
        assert (len(first.requests), len(second.requests)) == (1, 4)
        await house.complete(prompt=[9, *prompt], max_tokens=1)
        assert len(first.requests) == 2


async def test_an_idle_adapter_goes_where_it_was_served_last(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        await house.seed("a1")
        first, second = house.engines
        first.pause_after = 1
        busy = asyncio.create_task(house.complete(max_tokens=2))
        await eventually(lambda: first.running == 1, "a busy engine")
        await house.complete("a1", max_tokens=1)
        first.go.set()
        await busy
        await idle_beats(house)
        for _ in range(20):
            await house.complete("a1", max_tokens=1)
        assert (len(first.requests), len(second.requests)) == (1, 21)


def _running(member: Member) -> int:
    return member.beat.load.running if isinstance(member.beat.load, EngineLoad) else 0


async def idle_beats(house: House) -> None:
    """Wait until every engine's last beat says that nothing runs."""
    await eventually(lambda: not any(_running(m) for m in house.members.all()), "idle beats")


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


async def test_an_engine_that_did_not_answer_is_asked_for_its_health_and_then_used_again(tmp_path: Path) -> None:
    async with open_house(tmp_path, engines=2) as house:
        first, second = house.engines
        there = first.address
        first.address, first.incarnation = "127.0.0.1:1", "next"
        await heard(house, "engine-0", "127.0.0.1:1")
        await house.complete(max_tokens=1)
        second.running = 5  # so says its beat: whoever may be called is called before it
        await eventually(lambda: any(_running(m) == 5 for m in house.members.all()), "a busy beat")
        for _ in range(3):
            await house.complete(max_tokens=1)
        assert (len(first.requests), len(second.requests)) == (0, 4)
        first.address = there
        await heard(house, "engine-0", there)

        async def is_used() -> bool:
            await house.complete(max_tokens=1)
            return bool(first.requests)

        async with asyncio.timeout(10):
            while not await is_used():
                await asyncio.sleep(0.05)
        second.running = 0


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
