"""The official client, unmodified, against a system that serves the demo model with a trained adapter."""

from collections.abc import AsyncIterator

import openai
import pytest

from support.demo import ADAPTERS, demo_model
from support.stacks import StackFactory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

QUESTION = [{"role": "user", "content": "Where is the harbour?"}]


@pytest.fixture
async def client(stacks: StackFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    api = await stacks.start(demo_model("smollm2-135m"), env={"INFINILORA_ADAPTER_ROOTS": str(ADAPTERS)})
    for name in ("json", "pirate"):
        await api.register(name, ADAPTERS / name)
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


async def test_the_official_client_chats_completes_streams_lists_and_fails(
    client: openai.AsyncOpenAI,
) -> None:
    listed = {m.id async for m in await client.models.list()}
    assert listed == {"tiny", "json", "pirate"}

    chat = await client.chat.completions.create(
        model="pirate",
        messages=QUESTION,
        max_tokens=32,
        temperature=0,  # type: ignore[arg-type]
    )
    text = chat.choices[0].message.content
    assert text
    assert chat.usage is not None
    assert chat.usage.completion_tokens > 0

    pieces, usage = [], None
    async for chunk in await client.chat.completions.create(
        model="pirate",
        messages=QUESTION,  # type: ignore[arg-type]
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

    completion = await client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=8)
    assert completion.choices[0].text

    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nobody", messages=QUESTION)  # type: ignore[arg-type]
    assert missing.value.code == "adapter_not_found"
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="tiny", prompt="x", max_tokens=10_000_000)
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.2).chat.completions.create(
            model="tiny",
            messages=QUESTION,
            max_tokens=2000,  # type: ignore[arg-type]
        )


async def test_demo_adapters_behave(stacks: StackFactory, client: openai.AsyncOpenAI) -> None:
    from support.demo import BEHAVES, UNSEEN

    for name in ("json", "pirate"):
        for prompt in UNSEEN[name]:
            answer = await client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": prompt}], max_tokens=64, temperature=0
            )
            assert BEHAVES[name](answer.choices[0].message.content or ""), (name, prompt, answer)
