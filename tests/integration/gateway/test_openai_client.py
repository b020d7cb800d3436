"""The official client, unmodified, against a gateway on a real port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from infinilora.protocol.errors import Overloaded
from support.gateway_house import House, open_house

pytestmark = pytest.mark.integration

FOX = "The quick brown 🦊 jumps"


@asynccontextmanager
async def client_of(root: Path, **settings: Any) -> AsyncIterator[tuple[AsyncOpenAI, House]]:
    async with (
        open_house(root, **settings) as house,
        AsyncOpenAI(base_url=f"{house.url}/v1", api_key="any", max_retries=0, timeout=20) as client,
    ):
        house.say(FOX)
        yield client, house


async def test_chat_and_completion_whole_and_streamed(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, house):
        digest = await house.seed("pirate")
        house.say("Arr!", digest)
        messages: Any = [{"role": "user", "content": "hello"}]
        chat = await client.chat.completions.create(model="pirate", messages=messages, logprobs=True, top_logprobs=1)
        assert chat.choices[0].message.content == "Arr!"
        assert chat.choices[0].logprobs is not None
        assert chat.usage is not None
        assert chat.usage.completion_tokens == len(house.engine.scripts[digest])

        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == FOX
        assert chunks[-1].usage is not None
        assert chunks[-2].choices[0].finish_reason == "stop"

        whole = await client.completions.create(model="tiny", prompt="x", stop="quick", n=2)
        assert [choice.text for choice in whole.choices] == ["The ", "The "]
        parts = [
            part.choices[0].text
            async for part in await client.completions.create(model="tiny", prompt="x", stream=True)
        ]
        assert "".join(parts) == FOX

        raw = await client.completions.with_raw_response.create(model="pirate", prompt=[5, 6], max_tokens=1)
        assert raw.headers["x-adapter-digest"] == digest


async def test_models_are_listed_and_retrieved(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, house):
        await house.seed("pirate")
        assert {model.id async for model in client.models.list()} == {"tiny", "pirate"}
        assert (await client.models.retrieve("pirate")).owned_by == "default"


async def test_errors_arrive_as_the_clients_own(tmp_path: Path) -> None:
    async with client_of(tmp_path, max_tenant_requests=2) as (client, house):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="nope", prompt="x")
        assert (missing.value.code, missing.value.param) == ("adapter_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.completions.create(model="tiny", prompt="x", max_tokens=10_000)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt="x", n=3)
        house.engine.refuse = [Overloaded("full")]
        with pytest.raises(openai.InternalServerError) as full:
            await client.completions.create(model="tiny", prompt="x")
        assert full.value.status_code == 503
        house.engine.refuse = [Overloaded("full")]
        patient = client.with_options(max_retries=1)
        assert (await patient.completions.create(model="tiny", prompt="x")).choices[0].text == FOX


async def test_a_timeout_of_the_client_frees_the_engine(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, house):
        house.engine.pause_after = 1
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).completions.create(model="tiny", prompt="x")
        await house.until_idle()
        assert house.engine.cancelled == 1
