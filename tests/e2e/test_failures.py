"""What dies, and what the client sees: an error with a stable code or a pause, never base output."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.api import Api, stream_ids
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = [5, 77, 12, 3, 99, 41, 8, 120]
LONG = 8000
STABLE_CODES = {"adapter_failed", "adapter_loading", "unavailable", "overloaded"}


class World:
    """A served tiny model with one adapter `a`, and its oracle."""

    def __init__(self, stacks: StackFactory, api: Api, oracle: Oracle, adapter: Path) -> None:
        self.stacks, self.api, self.oracle, self.adapter = stacks, api, oracle, adapter

    def assert_right(self, tokens: list[int], *, adapter: bool = True) -> None:
        assert self.oracle.shortfall(PROMPT, tokens, self.adapter if adapter else None) <= 2e-3


async def build(stacks: StackFactory, root: Path) -> World:
    checkpoint = make_tiny_model("llama-long", root / "tiny").directory
    oracle = Oracle(checkpoint)
    adapter = write_adapter(root / "a", checkpoint, rank=8, targets=ATTENTION + MLP, seed=1, std=0.3)
    assert oracle.effect(PROMPT, adapter) >= 0.3
    api = await stacks.start(checkpoint)
    await api.register("a", adapter)
    await api.generate("a", PROMPT, max_tokens=2)
    return World(stacks, api, oracle, adapter)


async def read(api: Api, model: str, *, started: asyncio.Event, max_tokens: int) -> list[dict[str, Any]]:
    events = []
    async for event in api.stream(model, PROMPT, max_tokens=max_tokens):
        events.append(event)
        if len(stream_ids(events)) >= 3:
            started.set()
    return events


async def test_a_killed_lora_server_is_an_error_or_a_pause_never_base(stacks: StackFactory, tmp_path: Path) -> None:
    world = await build(stacks, tmp_path)
    started = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read(world.api, "a", started=started, max_tokens=LONG))
        await started.wait()
        stacks.stack.kill("lora-server")
    events = reading.result()
    tokens = stream_ids(events)
    world.assert_right(tokens)
    if len(tokens) < LONG:
        assert events[-1]["error"]["code"] in STABLE_CODES
    again = await eventually(lambda: world.api.generate("a", PROMPT, max_tokens=8), within_s=20)
    world.assert_right(again)


async def eventually(call: Any, *, within_s: float) -> list[int]:
    """Retry what a client would retry (503, 424) until it works."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                tokens: list[int] = await call()
            except httpx.HTTPStatusError as error:
                assert error.response.json()["error"]["code"] in STABLE_CODES
                await asyncio.sleep(0.2)
            else:
                return tokens


@pytest.mark.parametrize("away", ["nats", "redis"])
async def test_streams_and_resident_adapters_outlive_the_bus_and_the_store(
    away: str, stacks: StackFactory, tmp_path: Path
) -> None:
    world = await build(stacks, tmp_path)
    pids = {n: p for n, p in stacks.stack.pids().items() if n != away}
    started = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read(world.api, "a", started=started, max_tokens=LONG))
        await started.wait()
        outage = tasks.create_task(stacks.stack.outage(away, for_s=10))
        while not outage.done():
            world.assert_right(await world.api.generate("a", PROMPT, max_tokens=4))
            world.assert_right(await world.api.generate("tiny", PROMPT, max_tokens=4), adapter=False)
    tokens = stream_ids(reading.result())
    assert len(tokens) == LONG
    world.assert_right(tokens)
    listed = await world.api.wait("/v1/adapters", lambda b: bool(b["data"]), within_s=20)
    assert [entry["name"] for entry in listed["data"]] == ["a"]
    other = write_adapter(tmp_path / "b", tmp_path / "tiny", rank=4, targets=ATTENTION, seed=9, std=0.3)
    await world.api.register("b", other)
    assert {n: p for n, p in stacks.stack.pids().items() if n != away} == pids
