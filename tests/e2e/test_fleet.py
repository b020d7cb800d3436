"""Two engines and a LoRA server: one engine dies, hangs or drains under streams, and no client loses a token."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.api import Api, stream_ids
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.seeded import outside
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model
from support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = [5, 77, 12, 3, 99, 41, 8, 120]
NUM_TOKENS = 800
BOUND = 2e-3
"""Of law 9: a logit below the best, or a part of the distribution."""
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 1},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.7, "seed": 12, "frequency_penalty": 0.05},
)


@dataclass
class Stream:
    """One client's: what it asked for, and the events it has had so far."""

    model: str
    sampling: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)

    async def read(self, api: Api) -> None:
        usage = {"stream_options": {"include_usage": True}}
        async for event in api.stream(self.model, PROMPT, max_tokens=NUM_TOKENS, **self.sampling, **usage):
            self.events.append(event)

    @property
    def tokens(self) -> list[int]:
        return stream_ids(self.events)

    @property
    def logprobs(self) -> list[float]:
        parts = [c["logprobs"] for e in self.events for c in e["choices"] if c.get("logprobs")]
        return [logprob for part in parts for logprob in part["token_logprobs"]]


@dataclass
class World:
    """Two engines of a tiny model with one adapter `a`, and its oracle."""

    stacks: StackFactory
    api: Api
    oracle: Oracle
    adapter: Path

    async def under_streams(self, strike: Callable[[], Awaitable[None]]) -> list[Stream]:
        """Run every kind of stream, strike once they are under way, and read them to their ends.

        They are on both engines, by load; to ask a heartbeat for that takes longer than a stream of the base does.
        """
        streams = [Stream(model, sampling) for sampling in SAMPLINGS for model in ("a", "tiny")]
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.read(self.api))
            while not is_time([len(stream.tokens) for stream in streams]):
                await asyncio.sleep(0.02)
            await strike()
        return streams

    def assert_whole_and_right(self, stream: Stream) -> None:
        assert not [event for event in stream.events if "error" in event], stream.events[-1]
        assert len(stream.tokens) == NUM_TOKENS
        usage = stream.events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), NUM_TOKENS)
        adapter = self.adapter if stream.model == "a" else None
        sampling = {key: value for key, value in stream.sampling.items() if key != "logprobs"}
        if sampling["temperature"]:
            logits = self.oracle.logits(PROMPT + stream.tokens, adapter)[len(PROMPT) - 1 : -1]
            assert outside(logits, stream.tokens, **sampling) <= BOUND
        else:
            assert self.oracle.shortfall(PROMPT, stream.tokens, adapter) <= BOUND
        if "logprobs" in stream.sampling:
            wanted = self.oracle.logprobs(PROMPT + stream.tokens, adapter)[len(PROMPT) - 1 :]
            assert max(abs(a - b) for a, b in zip(stream.logprobs, wanted, strict=True)) <= 1e-3

    async def until_whole(self) -> None:
        """Return once both engines are free, and the gateway sends sequences to either.

        It hears of an engine later than the coordinator, and asks one that hung for its health every two seconds only.
        """
        await self.stacks.fleet(all_is_free, within_s=60)
        await eventually(self._calls_both, "the gateway calls both engines", timeout_s=60)

    async def _calls_both(self) -> bool:
        return await self._told(r"infinilora_engine_breaker_open\{.*\}") == [0, 0]

    async def num_moved(self) -> int:
        """Sequences that went from one engine to another."""
        return sum(await self._told("infinilora_engine_retries_total"))

    async def _told(self, name: str) -> list[int]:
        """The gateway's metrics of this name."""
        text = (await self.api.http.get("/metrics")).text
        return [int(float(value)) for value in re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)]


def is_time(counts: list[int]) -> bool:
    """Whether to strike. Streams of the base may be alone on an engine, which is far ahead of what was read of them."""
    return min(counts) > 20 or max(counts) > NUM_TOKENS // 8


def all_is_free(fleet: dict[str, Any]) -> bool:
    engines = [member for member in fleet["members"] if member["kind"] == "engine"]
    loads = [one["load"] for one in engines if (one["state"], one["health"]) == ("ready", "alive")]
    return len(loads) == 2 and all(load["kv_blocks_free"] == load["kv_blocks_total"] for load in loads)


async def build(stacks: StackFactory, root: Path) -> World:
    checkpoint = make_tiny_model("llama-long", root / "tiny").directory
    oracle = Oracle(checkpoint)
    adapter = write_adapter(root / "a", checkpoint, rank=8, targets=ATTENTION + MLP, seed=1, std=0.3)
    assert oracle.effect(PROMPT, adapter) >= 0.3
    api = await stacks.start(checkpoint, engines=2)
    await api.register("a", adapter)
    await api.generate("a", PROMPT, max_tokens=2)
    world = World(stacks, api, oracle, adapter)
    await world.until_whole()
    return world


SOAK = pytest.param(10, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])


@pytest.mark.parametrize("rounds", [1, SOAK])
async def test_an_engine_that_is_killed_or_hangs_loses_no_stream(
    stacks: StackFactory, tmp_path: Path, rounds: int
) -> None:
    world = await build(stacks, tmp_path)
    for number in (signal.SIGKILL, signal.SIGSTOP) * rounds:
        pid, before = stacks.stack.pid("engine.1"), await world.num_moved()
        assert pid is not None

        async def strike(pid: int = pid, number: signal.Signals = number) -> None:
            os.killpg(pid, number)

        streams = await world.under_streams(strike)

        for stream in streams:
            world.assert_whole_and_right(stream)
        assert 1 <= await world.num_moved() - before <= len(streams)
        if number == signal.SIGSTOP:
            os.killpg(pid, signal.SIGCONT)
        await world.until_whole()


async def test_an_engine_that_is_asked_to_stop_takes_nothing_new_and_ends_its_streams(
    stacks: StackFactory, tmp_path: Path
) -> None:
    world = await build(stacks, tmp_path)
    pid = stacks.stack.pid("engine.1")
    assert pid is not None

    async def strike() -> None:
        os.kill(pid, signal.SIGTERM)
        for _ in range(10):
            tokens = await world.api.generate("a", PROMPT, max_tokens=4)
            assert world.oracle.shortfall(PROMPT, tokens, world.adapter) <= BOUND

    streams = await world.under_streams(strike)

    for stream in streams:
        world.assert_whole_and_right(stream)
    await stacks.fleet(all_is_free, within_s=60)
    assert stacks.stack.pid("engine.1") != pid
