"""An open-loop run of the real system, written down so that a simulation can be held against it.

Requests go out at the times that were drawn, whatever became of those before. Nobody retries: a run in which a
request fails is no record.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import httpx

from infinilora.bench.load import Ask, Timeline, stream


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to be sent; adapter -1 is the base."""

    at_s: float
    adapter: int
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What is drawn: Poisson arrivals, Zipf popularity, outputs evenly from half to three halves of `tokens`."""

    rate: float
    requests: int
    adapters: int
    zipf: float
    prompt: int
    tokens: int
    seed: int


def plan(arrivals: Arrivals) -> list[Planned]:
    """The same requests for the same arrivals."""
    dice = random.Random(arrivals.seed)  # noqa: S311 - no secret
    weights = list(accumulate((rank + 1) ** -arrivals.zipf for rank in range(arrivals.adapters)))
    planned, now = [], 0.0
    for _ in range(arrivals.requests):
        now += dice.expovariate(arrivals.rate)
        adapter = dice.choices(range(arrivals.adapters), cum_weights=weights)[0] if arrivals.adapters else -1
        prompt = tuple(dice.randrange(3, 100) for _ in range(arrivals.prompt))
        tokens = dice.randint(max(2, arrivals.tokens // 2), max(2, 3 * arrivals.tokens // 2))
        planned.append(Planned(now, adapter, prompt, tokens))
    return planned


async def play(url: str, planned: Sequence[Planned], names: Sequence[str], base: str) -> list[dict[str, float]]:
    """Send all of them; what each saw, in seconds since the run began."""
    limits = httpx.Limits(max_connections=len(planned) + 4)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        started_s = time.perf_counter()

        async def one(request: Planned) -> dict[str, float]:
            await asyncio.sleep(started_s + request.at_s - time.perf_counter())
            model = names[request.adapter] if request.adapter >= 0 else base
            seen = await stream(http, Ask(model, list(request.prompt), request.max_tokens))
            return _row(request, seen, started_s)

        return list(await asyncio.gather(*map(one, planned)))


def _row(request: Planned, seen: Timeline, started_s: float) -> dict[str, float]:
    return {
        "arrival_s": round(seen.sent_s - started_s, 6),
        "adapter": request.adapter,
        "prompt": len(request.prompt),
        "output": len(seen.arrivals_s),
        "ttft_s": round(seen.ttft_s, 6),
        "end_s": round(seen.arrivals_s[-1] - started_s, 6),
    }
