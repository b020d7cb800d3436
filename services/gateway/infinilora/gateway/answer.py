"""Runs a plan's choices side by side and shapes what they give, whole or as server-sent events.

Parts of an answer are pushed to a sink as they are made; a sink that waits (a slow client) slows its own
sequences down and nothing else. A stop string ends its choice by closing the engine's stream.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from infinilora.gateway.choice import Choice, Delta, Scored
from infinilora.gateway.plan import Plan
from infinilora.gateway.relay import Relay, first_error
from infinilora.protocol import generate_pb2
from infinilora.protocol.errors import Internal

Part = dict[str, Any]
Sink = Callable[[list[Part]], Awaitable[None]]


class Shape(Protocol):
    """How an answer looks: CompletionShape, ChatShape."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    def opening(self, index: int) -> Part | None: ...
    def echo(self, index: int, scored: tuple[Scored, ...]) -> Part: ...
    def delta(self, index: int, delta: Delta) -> list[Part]: ...
    def join(self, index: int, parts: list[Part]) -> Part: ...


@dataclass(slots=True)
class Pace:
    """When one choice's tokens were handed on, in seconds of `time.perf_counter`."""

    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0

    def note(self, now_s: float) -> None:
        if self.num_tokens == 0:
            self.first_s = now_s
        self.last_s = now_s
        self.num_tokens += 1


@dataclass(slots=True)
class Totals:
    """What a request has used so far, finished or not."""

    prompt_tokens: int
    paces: list[Pace]
    cached_tokens: int = 0
    degraded: bool = False
    narrow: bool = False
    reasons: list[str] = field(default_factory=list)

    @property
    def completion_tokens(self) -> int:
        return sum(pace.num_tokens for pace in self.paces)

    def usage(self) -> dict[str, Any]:
        """The usage object; see `told`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        return usage | self.told()

    def told(self) -> dict[str, str]:
        """What every part of an answer says where it is not what the adapter exactly gives."""
        degraded, narrow = {"degraded": "base"}, {"narrow": "int8"}
        return (degraded if self.degraded else {}) | (narrow if self.narrow else {})


class Answer:
    """One request being answered. `totals` is right at any moment, also after a failure."""

    def __init__(self, plan: Plan, shape: Shape, relay: Relay) -> None:
        self.plan = plan
        self.totals = Totals(sum(len(p.ids) for p in plan.prompts), [Pace() for _ in range(plan.num_choices)])
        self._shape = shape
        self._relay = relay
        self._opened = [False] * plan.num_choices

    @property
    def is_complete(self) -> bool:
        return len(self.totals.reasons) == self.plan.num_choices

    async def run(self, sink: Sink) -> None:
        """Run every choice to its end. Raises the first error; the other choices are then cancelled."""
        if self.plan.num_choices == 1:
            return await self._run_choice(0, sink)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self.plan.num_choices):
                    group.create_task(self._run_choice(index, sink))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return None

    async def whole(self, created: int) -> dict[str, Any]:
        """The whole answer as one body."""
        parts: list[list[Part]] = [[] for _ in range(self.plan.num_choices)]

        async def keep(new: list[Part]) -> None:
            for part in new:
                parts[part["index"]].append(part)

        await self.run(keep)
        choices = [self._shape.join(index, made) for index, made in enumerate(parts)]
        return self.envelope(self._shape.whole_object, created, choices) | {"usage": self.totals.usage()}

    def chunk(self, created: int, parts: list[Part]) -> dict[str, Any]:
        """One event of a stream. It says itself what usage would: not every client asks for that."""
        chunk = self.envelope(self._shape.chunk_object, created, parts)
        chunk |= {"usage": None} if self.plan.wants_usage_chunk else {}
        return chunk | self.totals.told()

    def usage_chunk(self, created: int) -> dict[str, Any]:
        return self.envelope(self._shape.chunk_object, created, []) | {"usage": self.totals.usage()}

    def envelope(self, kind: str, created: int, choices: list[Part]) -> dict[str, Any]:
        return {
            "id": self._shape.id_prefix + self.plan.request_id,
            "object": kind,
            "created": created,
            "model": self.plan.target.requested,
            "choices": choices,
        }

    async def _run_choice(self, index: int, sink: Sink) -> None:
        choice, pace = self.plan.choice(), self.totals.paces[index]
        async with aclosing(self._relay.run(self.plan.job(index))) as events:
            async for event in events:
                # From the first event on: a stop string may end the choice before the engine's own end says it.
                self.totals.degraded |= event.degraded
                self.totals.narrow |= event.narrow
                parts = self._open(index, event)
                reason = None
                match event.WhichOneof("event"):
                    case "token":
                        delta = choice.push(_scored(event.token, has_logprob=self.plan.wants_logprobs))
                        parts, reason = parts + self._shape.delta(index, delta), delta.finish_reason
                    case "finished":
                        delta = self._finish(choice, event.finished)
                        parts, reason = parts + self._shape.delta(index, delta), delta.finish_reason
                if parts:
                    await sink(parts)
                if event.HasField("token"):
                    pace.note(time.perf_counter())
                if reason:
                    self.totals.reasons.append(reason)
                    return
        raise Internal("the engine's stream ended without an end")

    def _finish(self, choice: Choice, finished: generate_pb2.Finished) -> Delta:
        if finished.reason == "abort":
            raise Internal("the engine gave the sequence up")
        self.totals.cached_tokens += finished.cached_tokens
        self.totals.degraded |= finished.degraded
        return choice.finish(finished.reason)

    def _open(self, index: int, event: generate_pb2.GenerateEvent) -> list[Part]:
        """What comes before a choice's first token."""
        if self._opened[index]:
            return []
        self._opened[index] = True
        opening = self._shape.opening(index)
        parts = [opening] if opening else []
        return [*parts, self._shape.echo(index, self._scored_prompt(index, event))] if self.plan.echo else parts

    def _scored_prompt(self, index: int, event: generate_pb2.GenerateEvent) -> tuple[Scored, ...]:
        """The prompt's tokens with their logprobs; the first has none."""
        if not self.plan.wants_logprobs:
            return ()
        first, *others = self.plan.prompt_of(index).ids
        rest = [_scored(token, has_logprob=True) for token in event.prompt_logprobs.tokens]
        if [token.id for token in rest] != others:
            raise Internal(f"the engine scored {len(rest)} prompt tokens; wanted the {len(others)} of the prompt")
        return (Scored(first, None, ()), *rest)


def _scored(token: generate_pb2.Token, *, has_logprob: bool) -> Scored:
    if not has_logprob:
        return Scored(token.id, None, ())
    return Scored(token.id, token.logprob, tuple((t.id, t.logprob) for t in token.top))
