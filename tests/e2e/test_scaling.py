"""A system that follows its coordinator gains an engine and a LoRA server, loses them again, and no stream is lost."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from infinilora.cli.follow import Most, follow
from infinilora.cli.up import scaled
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
    api = await stacks.start(checkpoint, env={**scaled(1, 2, 2), **QUICK})
    await api.register("a", write_adapter(tmp_path / "a", checkpoint, rank=8, targets=ATTENTION, seed=1, std=0.3))
    events: list[tuple[str, str]] = []
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(
            follow(stacks.stack, lambda name, event: events.append((name, event)), most=Most(2, 2), every_s=0.5)
        )
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
