"""A load generator over the HTTP API: concurrent streams in, tokens with their arrival times out.

Closed loop: `streams` clients, each with one request in flight. Token-id prompts, so that a prompt's length is exact.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx


@dataclass(slots=True)
class Timeline:
    """When a request was sent and when each of its tokens came, in seconds of one clock."""

    model: str
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (len(self.arrivals_s) - 1)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: who answers, what it is asked, how much it may say."""

    model: str
    prompt: list[int]
    max_tokens: int


async def stream(http: httpx.AsyncClient, ask: Ask) -> Timeline:
    """Run one streaming completion; raises RuntimeError on an error answer or event."""
    timeline = Timeline(ask.model, time.perf_counter())
    body = {
        "model": ask.model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 0,
    }
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            now = time.perf_counter()
            for choice in event["choices"]:
                tokens = (choice.get("logprobs") or {}).get("tokens") or []
                timeline.arrivals_s += [now] * len(tokens)
    return timeline


async def run_together(url: str, asks: Sequence[Ask]) -> list[Timeline]:
    """All asks at once; returns when all are answered."""
    limits = httpx.Limits(max_connections=len(asks) + 4)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        return list(await asyncio.gather(*(stream(http, ask) for ask in asks)))


def decode_throughput(timelines: Sequence[Timeline]) -> float:
    """Tokens per second while every stream was decoding: from the last first token to the first last token."""
    start = max(t.arrivals_s[0] for t in timelines)
    end = min(t.arrivals_s[-1] for t in timelines)
    tokens = sum(1 for t in timelines for a in t.arrivals_s if start < a <= end)
    return tokens / (end - start)
