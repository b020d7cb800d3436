"""Class C: on every path an adapter stays itself, and the base is the base that it would be without LoRA."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.api import stream_ids
from support.cases import EFFECT_FLOOR, PROMPT, prompt_of
from support.worlds import GOOD, TEACHER_FORCED_BOUND, Answer, World, base_answer, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]

NOISE = 1e-5


@pytest.mark.parametrize("running", ["L", "Q", "M", "L/one-slot", "L/in-2"], indirect=True)
async def test_c03_the_base_is_what_it_is_without_lora(
    world: World, without_lora: Callable[[str], Awaitable[Answer]]
) -> None:
    """Of systems that hold an adapter, with one slot and many, in one process and in two."""
    wanted = await without_lora(world.name.partition("/")[0])
    told = await base_answer(world.api)
    assert told.tokens == wanted.tokens
    assert max(abs(a - b) for a, b in zip(told.logprobs, wanted.logprobs, strict=True)) <= NOISE


@pytest.mark.parametrize("running", ["L", "L/engines", "L/in-2", "L/tight", "L-long/hybrid", "Q2/2x2"], indirect=True)
async def test_c19_an_adapter_is_itself_on_every_path(world: World) -> None:
    """In every way that rows of an adapter are computed; asked for one by one, together, as choices, as a stream."""
    assert world.oracle.effect(world.good) >= EFFECT_FLOOR
    prompts = [PROMPT, prompt_of(9), prompt_of(30)]
    body = {"model": GOOD, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    async def choices(**more: Any) -> list[list[int]]:
        answer = await world.api.http.post("/v1/completions", json=body | more)
        return [choice["token_ids"] for choice in answer.raise_for_status().json()["choices"]]

    one, two = await choices(prompt=PROMPT), await choices(prompt=PROMPT, n=2)
    stream = stream_ids([event async for event in world.api.stream(GOOD, PROMPT, max_tokens=16)])
    told = [(PROMPT, tokens) for tokens in (*one, *two, stream)]
    told += zip(prompts, await choices(prompt=prompts), strict=True)
    for prompt, tokens in told:
        assert len(tokens) == 16
        world.assert_right(GOOD, prompt, tokens, world.good)
    assert any(world.oracle.shortfall(prompt, tokens) > TEACHER_FORCED_BOUND for prompt, tokens in told)


@on("L/engines")
async def test_c19_streams_that_lose_their_engine_keep_their_adapter(running: World) -> None:
    begun = [asyncio.Event() for _ in range(6)]

    async def read(event: asyncio.Event) -> None:
        tokens: list[int] = []
        async for told in running.api.stream(GOOD, PROMPT, max_tokens=200):
            tokens += stream_ids([told])
            event.set()
        assert len(tokens) == 200
        running.assert_right(GOOD, PROMPT, tokens, running.good)
        assert running.oracle.shortfall(PROMPT, tokens) > TEACHER_FORCED_BOUND

    async with asyncio.TaskGroup() as tasks:
        for event in begun:
            tasks.create_task(read(event))
        await asyncio.gather(*(event.wait() for event in begun))
        running.factory.stack.kill("engine.1")
    await running.until_ready("engine", 2)
