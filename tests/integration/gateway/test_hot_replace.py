"""An adapter that is replaced under load, with every process real: each answer is one digest's, from end to end."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infinilora.cli.stack import Urls
from infinilora.protocol import keys
from support.api import Api, stream_ids
from support.oracle import ATTENTION, MLP, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TOKENS = 12
STREAMS = 6
FLIPS = 8
PROMPT = [5, 77, 12, 3, 99, 41, 8, 120, 64, 2, 31, 55] * 3
"""Longer than a block of the cache, and the same for all: what one version left there would be found by the other."""


@pytest.fixture
async def stacks(tmp_path: Path) -> AsyncIterator[StackFactory]:
    factory = StackFactory(tmp_path)
    yield factory
    await factory.stop()


async def generate(api: Api, model: str) -> tuple[str, tuple[int, ...]]:
    """The digest that an answer names, and its tokens."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = await api.http.post("/v1/completions", json=body | {"return_token_ids": True})
    answer.raise_for_status()
    return answer.headers["x-adapter-digest"], tuple(answer.json()["choices"][0]["token_ids"])


async def test_no_answer_mixes_two_versions_while_a_name_flips(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    api = await stacks.start(checkpoint)
    wanted: dict[str, tuple[int, ...]] = {}
    for seed, replace in enumerate((False, True, True)):
        source = write_adapter(tmp_path / f"v{seed}", checkpoint, rank=8, targets=ATTENTION + MLP, seed=seed, std=0.3)
        made = await api.register("a", source, replace=replace)
        digest, tokens = await generate(api, f"a@{made['digest']}")
        assert digest == made["digest"]
        wanted[digest] = tokens
    assert len(set(wanted.values())) == 3, "this test could not tell the versions apart"

    seen: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def ask() -> None:
        while not is_over.is_set():
            digest, tokens = await generate(api, "a")
            assert tokens == wanted[digest], "tokens of another version than the answer's"
            seen[digest] += 1

    async def flip() -> None:
        for number in range(FLIPS):
            before = sum(seen.values())
            answer = await api.http.post("/v1/adapters/a/rollback", json={"to": 1 + number % 3})
            answer.raise_for_status()
            assert await generate(api, "a") == (answer.json()["digest"], wanted[answer.json()["digest"]])
            while sum(seen.values()) < before + STREAMS:
                await asyncio.sleep(0.01)
        is_over.set()

    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(ask())
        group.create_task(flip())
    assert set(seen) == set(wanted), "every version answered under load"


async def test_a_stream_that_runs_while_its_adapter_is_deleted_ends_as_it_began(
    stacks: StackFactory, tmp_path: Path
) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    grace = {"INFINILORA_DELETE_GRACE_S": "0"}
    api = await stacks.start(checkpoint, env=grace, urls=Urls(store=f"file://{tmp_path}/store"))
    source = write_adapter(tmp_path / "a", checkpoint, rank=8, targets=ATTENTION + MLP, seed=1, std=0.3)
    made = await api.register("a", source)
    alone = await api.generate("a", PROMPT, max_tokens=48)
    stored = tmp_path / "store" / keys.packed(made["digest"])
    assert stored.exists()

    events = []
    async for event in api.stream("a", PROMPT, max_tokens=48):
        events.append(event)
        if len(events) == 1:
            (await api.http.delete("/v1/adapters/a")).raise_for_status()
    assert stream_ids(events) == alone
    assert (await api.http.post("/v1/completions", json={"model": "a", "prompt": PROMPT})).status_code == 404
    async with asyncio.timeout(30):
        while stored.exists():
            await asyncio.sleep(0.05)
    assert (await api.register("a", source))["version"] == 2
    assert await api.generate("a", PROMPT, max_tokens=48) == alone
