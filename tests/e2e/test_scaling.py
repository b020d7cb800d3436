"""A system that follows its coordinator: it grows with the load and shrinks after it, and sleeps while nobody comes."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from infinilora.cli.follow import Range, follow
from support.api import Api, stream_ids
from support.oracle import ATTENTION, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = [5, 77, 12, 3, 99, 41, 8, 120]
NUM_TOKENS = 600
QUICK = {
    "INFINILORA_ENGINE_SEQUENCES": "4",
    "INFINILORA_GROUP_SEQUENCES": "2",
    "INFINILORA_LEAD_S": "6",
    "INFINILORA_SCALE_HOLD_S": "4",
    "INFINILORA_HEAT_HALF_LIVES_S": "1",
}


ONE_OR_TWO = Range(engines=(1, 2), groups=(1, 2))
NONE_OR_ONE = Range(engines=(0, 1), groups=(0, 1))


def ignored(name: str, event: str) -> None:
    """What happens to the programs is seen in the fleet."""


def ready(fleet: dict[str, Any], kind: str) -> list[str]:
    there = (m for m in fleet["members"] if m["kind"] == kind and m["health"] == "alive" and m["state"] == "ready")
    return sorted(member["id"] for member in there)


async def stream(api: Api, model: str) -> int:
    """The tokens that came, over streams one after the other, until cancelled; none of them may break."""
    events = [event async for event in api.stream(model, PROMPT, max_tokens=NUM_TOKENS, temperature=0)]
    assert not [event for event in events if "error" in event], events[-1]
    return len(stream_ids(events))


async def load(api: Api, is_over: asyncio.Event) -> None:
    """Six streams at a time, each followed by another until it is over; every one is whole."""

    async def one(model: str) -> None:
        while not is_over.is_set():
            assert await stream(api, model) == NUM_TOKENS

    async with asyncio.TaskGroup() as tasks:
        for model in ("a", "tiny") * 3:
            tasks.create_task(one(model))


async def test_the_fleet_grows_with_the_load_and_shrinks_after_it(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama-long", tmp_path / "tiny").directory
    api = await stacks.start(checkpoint, env={**ONE_OR_TWO.settings(), **QUICK})
    await api.register("a", write_adapter(tmp_path / "a", checkpoint, rank=8, targets=ATTENTION, seed=1, std=0.3))
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(stacks.stack, ignored, within=ONE_OR_TWO, every_s=0.5))
        loading = tasks.create_task(load(api, is_over))
        grown = await stacks.fleet(
            lambda f: len(ready(f, "engine")) == 2 and len(ready(f, "lora-server")) == 2, within_s=90
        )
        assert ready(grown, "engine") == ["engine-0", "engine-1"]
        assert ready(grown, "lora-server") == ["lora-0", "lora-1"]
        is_over.set()
        await loading
        await stacks.fleet(
            lambda f: ready(f, "engine") == ["engine-0"] and ready(f, "lora-server") == ["lora-0"], within_s=90
        )
        while {"engine.1", "lora-server.lora-1"} & set(stacks.stack.names()):
            await asyncio.sleep(0.1)
        assert await stream(api, "a") == NUM_TOKENS
        following.cancel()


async def until_asleep(stacks: StackFactory) -> None:
    """Until no process of an engine or a LoRA server is left."""
    stack = stacks.stack
    async with asyncio.timeout(60):
        while {"engine", "lora-server"} & set(stack.names()):
            await asyncio.sleep(0.1)
    await stacks.fleet(lambda f: not ready(f, "engine") and not ready(f, "lora-server"), within_s=10)


async def generated(api: Api, model: str) -> list[int]:
    """Eight tokens, from a client that comes again when it is told when to, as any client of the API does."""
    async with asyncio.timeout(90):
        while True:
            try:
                return await api.generate(model, PROMPT, max_tokens=8)
            except httpx.HTTPStatusError as error:
                assert error.response.status_code == 503, error.response.text
                await asyncio.sleep(float(error.response.headers["retry-after"]))


async def test_a_base_that_nobody_uses_sleeps_and_the_next_request_wakes_it(
    stacks: StackFactory, tmp_path: Path
) -> None:
    checkpoint = make_tiny_model("llama-long", tmp_path / "tiny").directory
    api = await stacks.start(checkpoint, env={**NONE_OR_ONE.settings(), **QUICK, "INFINILORA_SCALE_IDLE_S": "4"})
    await api.register("a", write_adapter(tmp_path / "a", checkpoint, rank=8, targets=ATTENTION, seed=1, std=0.3))
    awake = {model: await api.generate(model, PROMPT, max_tokens=8) for model in ("a", "tiny")}
    assert awake["a"] != awake["tiny"]
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(stacks.stack, ignored, within=NONE_OR_ONE, every_s=0.5))

        await until_asleep(stacks)
        assert (await api.http.get("/readyz")).status_code == 200, "or no load balancer would send it the next request"
        assert {one["id"] for one in (await api.http.get("/v1/models")).json()["data"]} >= {"a", "tiny"}
        assert await generated(api, "a") == awake["a"]

        await until_asleep(stacks)
        started_since = await stacks.another_gateway("gateway-1", {})
        assert await generated(started_since, "a") == awake["a"]

        await until_asleep(stacks)
        await stacks.empty_redis()
        assert await generated(api, "a") == awake["a"]
        assert await generated(started_since, "tiny") == awake["tiny"]
        following.cancel()
