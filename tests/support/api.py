"""A thin client of the HTTP API for the tests: token-id prompts in, logprobs and token ids out."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass(frozen=True)
class Scored:
    """A prompt's logprobs (position 1 onward), what was generated after it, and the answer's headers."""

    prompt_logprobs: list[float]
    token_ids: list[int]
    headers: httpx.Headers
    finish_reason: str


class Api:
    """One base URL. Every method raises httpx.HTTPStatusError on an error answer."""

    def __init__(self, url: str, *, timeout_s: float = 60) -> None:
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=httpx.Limits(max_connections=200))

    async def register(self, name: str, source: Path, *, patience_s: float = 20, **extra: Any) -> dict[str, Any]:
        """Register from a directory; a 503 is tried again as its Retry-After says, as a client would."""
        body = {"name": name, "source": f"file://{source}", **extra}
        async with asyncio.timeout(patience_s):
            while (answer := await self.http.post("/v1/adapters", json=body)).status_code == 503:
                await asyncio.sleep(float(answer.headers["retry-after"]))
        answer.raise_for_status()
        entry: dict[str, Any] = answer.json()
        return entry

    async def score(self, model: str, prompt: list[int], *, max_tokens: int = 0) -> Scored:
        """Score a prompt and, if asked, continue it greedily; ignores end-of-sequence ids."""
        answer = await self.http.post(
            "/v1/completions",
            json={
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "echo": True,
                "logprobs": 1,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"]
        assert logprobs[0] is None
        return Scored(
            prompt_logprobs=logprobs[1 : len(prompt)],
            token_ids=choice["token_ids"],
            headers=answer.headers,
            finish_reason=choice["finish_reason"],
        )

    async def generate(self, model: str, prompt: list[int], **sampling: Any) -> list[int]:
        body = {
            "model": model,
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await self.http.post("/v1/completions", json=body | sampling)
        answer.raise_for_status()
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    async def stream(self, model: str, prompt: list[int], **sampling: Any) -> AsyncIterator[dict[str, Any]]:
        """Each SSE event's JSON; stops at [DONE], or at the end of the connection without one."""
        body = {
            "model": model,
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        async with self.http.stream("POST", "/v1/completions", json=body | sampling) as answer:
            if answer.status_code != 200:
                await answer.aread()
                answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    async def wait(self, path: str, condition: Any, *, within_s: float) -> dict[str, Any]:
        """Poll a JSON endpoint until condition(body) holds."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    answer = await self.http.get(path)
                    if answer.status_code == 200 and condition(body := answer.json()):
                        found: dict[str, Any] = body
                        return found
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        await self.http.aclose()


def stream_ids(events: list[dict[str, Any]]) -> list[int]:
    return [t for e in events for c in e.get("choices", []) for t in c.get("token_ids") or []]
