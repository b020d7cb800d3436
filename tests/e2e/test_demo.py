"""What a newcomer sees: the trained adapters behave through the official client, dense and mixture of experts."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from support.demo import ADAPTERS, BASE_OF, BEHAVES, demo_model, unseen
from support.stacks import StackFactory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

QUESTION: Any = [{"role": "user", "content": "Where is the harbour?"}]
PATIENCE = 8
"""Of ten unseen prompts each adapter answered ten in its manner when it was trained; floating point may cost some."""


async def serve(stacks: StackFactory, base: str) -> openai.AsyncOpenAI:
    api = await stacks.start(demo_model(base), env={"INFINILORA_ADAPTER_ROOTS": str(ADAPTERS)})
    for name in sorted(name for name, of in BASE_OF.items() if of == base):
        await api.register(name, ADAPTERS / name)
    return openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.fixture
async def dense(stacks: StackFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    async with await serve(stacks, "smollm2-135m") as client:
        yield client


@pytest.fixture
async def moe(stacks: StackFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    async with await serve(stacks, "smollm2-moe") as client:
        yield client


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str) -> str:
    messages: Any = [{"role": "user", "content": prompt}]
    answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=48, temperature=0)
    return answer.choices[0].message.content or ""


async def in_manner(client: openai.AsyncOpenAI, judge: str, model: str) -> int:
    answers = await asyncio.gather(*(ask(client, model, prompt) for prompt in unseen(judge)[:10]))
    return sum(map(BEHAVES[judge], answers))


async def test_dense_adapters_behave_and_base_does_not(dense: openai.AsyncOpenAI) -> None:
    for name in ("json", "pirate"):
        assert await in_manner(dense, name, name) >= PATIENCE
        assert await in_manner(dense, name, "tiny") < PATIENCE


async def test_the_moe_adapter_behaves_and_its_base_still_speaks(moe: openai.AsyncOpenAI) -> None:
    assert await in_manner(moe, "sql", "sql") >= PATIENCE
    assert "Paris" in await ask(moe, "tiny", "What is the capital of France?")


async def test_the_official_client_chats_streams_lists_and_fails(dense: openai.AsyncOpenAI) -> None:
    assert {m.id async for m in await dense.models.list()} == {"tiny", "json", "pirate"}
    chat = await dense.chat.completions.create(model="pirate", messages=QUESTION, max_tokens=32, temperature=0)
    text = chat.choices[0].message.content
    assert text
    assert chat.usage is not None

    pieces, usage = [], None
    async for chunk in await dense.chat.completions.create(
        model="pirate",
        messages=QUESTION,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        pieces += [c.delta.content or "" for c in chunk.choices]
    assert "".join(pieces) == text
    assert usage is not None
    assert usage.completion_tokens == chat.usage.completion_tokens
    completion = await dense.completions.create(model="tiny", prompt="Once upon a time", max_tokens=8)
    assert completion.choices[0].text

    with pytest.raises(openai.NotFoundError) as missing:
        await dense.chat.completions.create(model="nobody", messages=QUESTION)
    assert missing.value.code == "adapter_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        await dense.completions.create(model="tiny", prompt="x", max_tokens=10_000_000)
    assert too_long.value.code == "context_length_exceeded"
    impatient = dense.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        await impatient.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2000)
