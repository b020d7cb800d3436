"""What steps and first tokens take on a system that runs, measured as its clients see them: points for a fit of costs.

    decode   n streams together: seconds between two tokens of each
    alone    the first token of a request on an idle system
    joined   the same while n streams decode: less half a step of theirs, which an arrival waits for on average

Prompts are drawn anew, so that none is in a prefix cache.
"""

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx

from infinilora.bench.load import Ask, Timeline, decode_throughput, stream

PROMPT = 16
"""Of streams that are to decode."""
PAUSE_S = (0.02, 0.1)
"""Between one first token that joins and the next request."""
DOUBLINGS = 5
"""Streams that were too short to decode together are asked again, twice as long, so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement: seconds of a step, or of a first token (`is_first`); whether its adapter was nobody's before."""

    seconds: float
    rows: int
    tokens: int
    context: int
    adapters: int
    is_first: bool = False
    asks_lease: bool = False


class Meter:
    """Asks one system. `names` are its adapters; without any it asks the base."""

    def __init__(self, http: httpx.AsyncClient, names: Sequence[str], *, base: str, seed: int) -> None:
        self._http = http
        self._names = names or [base]
        self._has_adapters = bool(names)
        self._dice = random.Random(seed)  # noqa: S311 - no secret

    async def decode(self, streams: int, *, tokens: int, prompt: int = PROMPT, names: int = 0) -> Point:
        """Of `names` adapters, dealt in turn; 0: of all."""
        dealt = self._names[: names or len(self._names)]
        for longer in range(DOUBLINGS):
            asks = [self._ask(dealt[n % len(dealt)], prompt, tokens << longer) for n in range(streams)]
            seen = await asyncio.gather(*(stream(self._http, ask) for ask in asks))
            if window_s(seen) > 0:
                return Point(
                    seconds=streams / decode_throughput(seen),
                    rows=streams,
                    tokens=streams,
                    context=streams * (prompt + (tokens << longer) // 2),
                    adapters=min(streams, len(dealt)) * self._has_adapters,
                )
        raise RuntimeError(f"{streams} streams of {tokens} tokens, and longer ones, never decoded together")

    async def alone(self, prompt: int, *, times: int) -> Point:
        seen = [await self.first(self._names[n % len(self._names)], prompt) for n in range(times)]
        return Point(
            seconds=statistics.median(seen),
            rows=prompt,
            tokens=1,
            context=prompt,
            adapters=int(self._has_adapters),
            is_first=True,
            asks_lease=self._has_adapters,
        )

    async def joined(self, streams: int, prompt: int, *, tokens: int) -> Point:
        """As many first tokens as find room while the streams decode; their adapters are the streams'."""
        dealt = self._names[:streams]
        for longer in range(DOUBLINGS):
            joins: list[Timeline] = []
            async with asyncio.TaskGroup() as tasks:
                asks = [self._ask(dealt[n % len(dealt)], PROMPT, tokens << longer) for n in range(streams)]
                background = [tasks.create_task(stream(self._http, ask)) for ask in asks]
                while not any(task.done() for task in background):
                    await asyncio.sleep(self._dice.uniform(*PAUSE_S))
                    joins.append(await stream(self._http, self._ask(self._dice.choice(dealt), prompt, 1)))
            adapters = len(dealt) * self._has_adapters
            if point := joined_point([task.result() for task in background], joins, prompt, adapters):
                return point
        raise RuntimeError(f"no first token came while {streams} streams of {tokens} tokens, or longer ones, decoded")

    async def first(self, name: str, prompt: int) -> float:
        """Seconds to the first token of a request that is alone."""
        return (await stream(self._http, self._ask(name, prompt, 1))).ttft_s

    def _ask(self, name: str, prompt: int, tokens: int) -> Ask:
        return Ask(name, [self._dice.randrange(3, 100) for _ in range(prompt)], tokens)


def window_s(seen: Sequence[Timeline]) -> float:
    """How long all of them decoded; below 0: never."""
    return min(t.arrivals_s[-1] for t in seen) - max(t.arrivals_s[0] for t in seen)


def joined_point(background: Sequence[Timeline], joins: Sequence[Timeline], prompt: int, adapters: int) -> Point | None:
    """The mean of those that came while all of the background decoded, less half of its step. None: none came."""
    start_s, end_s = max(t.arrivals_s[0] for t in background), min(t.arrivals_s[-1] for t in background)
    met = [t.ttft_s for t in joins if start_s < t.sent_s and t.arrivals_s[0] < end_s]
    if not met:
        return None
    gaps = [later - one for t in background for one, later in pairwise(t.arrivals_s)]
    tokens = statistics.mean(len(t.arrivals_s) for t in background)
    streams = len(background)
    return Point(
        seconds=statistics.mean(met) - statistics.median(gaps) / 2,
        rows=prompt + streams,
        tokens=1 + streams,
        context=prompt + int(streams * (PROMPT + tokens / 2)),
        adapters=adapters,
        is_first=True,
    )
