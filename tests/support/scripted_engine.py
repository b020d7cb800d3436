"""An engine that says what a test tells it to, over real gRPC: `Engine.Generate` without a model.

Its tokens are a function of (digest, seed, token index) or a script per digest, so that every answer can be
foretold, continued elsewhere, and told apart from another adapter's.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from infinilora.protocol.control import Beat, EngineLoad, ProcessState
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.generate_pb2 import (
    DESCRIPTOR,
    Finished,
    GenerateEvent,
    GenerateRequest,
    PromptLogprobs,
    Token,
    TokenLogprob,
)
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.rpc import Call, serving

SERVICE = DESCRIPTOR.services_by_name["Engine"]


@dataclass
class Loss:
    """The next stream to have given `after` tokens (0: only the prompt's scores) is lost, once. May be shared."""

    after: int
    error: InfiniLoraError
    is_spent: bool = False


@dataclass
class ScriptedEngine:
    """One engine. Tests read `requests`, `running` and `cancelled`, and set the rest."""

    base: Fingerprint
    model: str
    vocab_size: int
    eos: int
    id: str = "engine-0"
    scripts: dict[str, list[int]] = field(default_factory=dict)
    """What each digest ("": the base) says; after it comes the end. Without a script: `foretold` for ever."""
    words: Sequence[int] = ()
    """The tokens that `foretold` draws from; empty: all but the first three."""
    refuse: list[InfiniLoraError] = field(default_factory=list)
    """Errors for the next calls, before their first event."""
    refuse_later: list[InfiniLoraError] = field(default_factory=list)
    """Errors for the next calls that go on with a sequence, before their first event."""
    loss: Loss | None = None
    gives_up_after: int | None = None
    """Tokens after which a sequence is aborted, as by an engine that stops."""
    pause_after: int | None = None
    """Tokens after which calls wait until `go` is set."""
    emits_stop_token: bool = False
    degrades: bool = False
    narrows_after: int | None = None
    resident: tuple[Digest, ...] = ()
    state: ProcessState = "ready"
    go: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    running: int = 0
    finished: int = 0
    cancelled: int = 0
    address: str = ""
    incarnation: str = field(default_factory=lambda: secrets.token_hex(4))

    async def generate(self, request: GenerateRequest, call: Call) -> AsyncIterator[GenerateEvent]:
        self.requests.append(request)
        self.metadata.append(call.metadata)
        if self.refuse:
            raise self.refuse.pop(0)
        if self.refuse_later and len(request.token_ids) > request.num_prompt_tokens:
            raise self.refuse_later.pop(0)
        self.running += 1
        is_finished = False
        try:
            async for event in self._events(request):
                is_finished = event.HasField("finished")
                if is_finished:
                    self.finished += 1
                yield event
        finally:
            self.running -= 1
            self.cancelled += not is_finished

    def beat(self, seq: int) -> Beat:
        return Beat(
            kind="engine",
            id=self.id,
            incarnation=self.incarnation,
            seq=seq,
            state=self.state,
            address=self.address,
            base=self.base,
            model=self.model,
            load=EngineLoad(running=self.running, resident=self.resident),
        )

    @asynccontextmanager
    async def served(self, token: str = "") -> AsyncIterator["ScriptedEngine"]:
        async with serving("127.0.0.1:0", [(SERVICE, self)], token=token, grace_s=0) as server:
            self.address = server.address
            yield self

    async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        sampling, prompt = request.sampling, request.token_ids[: request.num_prompt_tokens]
        if sampling.prompt_logprobs >= 0:
            scored = [self._token(i, sampling.prompt_logprobs) for i in prompt[1:]]
            yield GenerateEvent(prompt_logprobs=PromptLogprobs(tokens=scored), degraded=self._is_base(request))
        produced = len(request.token_ids) - len(prompt)
        if produced == 0:
            self._lose_at(0)
        if self.pause_after == 0:
            await self.go.wait()
        for index in range(produced, sampling.max_tokens):
            token_id = self.foretold(request, index)
            is_end = token_id in sampling.stop_token_ids or (token_id == self.eos and not sampling.ignore_eos)
            if not is_end or self.emits_stop_token:
                is_narrow = self.narrows_after is not None and index >= self.narrows_after
                token = self._token(token_id, sampling.logprobs)
                yield GenerateEvent(token=token, degraded=self._is_base(request), narrow=is_narrow)
            if is_end:
                yield self._end(request, "stop", index + 1, token_id)
                return
            self._lose_at(index + 1)
            if index + 1 == self.gives_up_after:
                yield self._end(request, "abort", index + 1)
                return
            if self.pause_after is not None and index + 1 >= self.pause_after:
                await self.go.wait()
        yield self._end(request, "length", sampling.max_tokens)

    def _lose_at(self, num_tokens: int) -> None:
        if self.loss and not self.loss.is_spent and num_tokens >= self.loss.after:
            self.loss.is_spent = True
            raise self.loss.error

    def foretold(self, request: GenerateRequest, index: int) -> int:
        """The token at `index` of the answer; a fallback to the base says what the base would."""
        digest = "" if self._is_base(request) else request.digest
        if (script := self.scripts.get(digest)) is not None:
            return script[index] if index < len(script) else self.eos
        seed = request.sampling.seed if request.sampling.temperature > 0 else 0
        drawn = hashlib.sha256(f"{digest}/{seed}/{index}".encode()).digest()
        words = self.words or range(3, self.vocab_size)
        return words[int.from_bytes(drawn[:4]) % len(words)]

    def _token(self, token_id: int, logprobs: int) -> Token:
        if logprobs < 0:
            return Token(id=token_id)
        top = [TokenLogprob(id=(token_id + i) % self.vocab_size, logprob=-0.5 - i) for i in range(logprobs)]
        return Token(id=token_id, logprob=-0.5, top=top)

    def _end(self, request: GenerateRequest, reason: str, made: int, stop_id: int = 0) -> GenerateEvent:
        finished = Finished(
            reason=reason,
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=made,
            degraded=self._is_base(request),
            stop_token_id=stop_id,
        )
        return GenerateEvent(finished=finished, degraded=finished.degraded)

    def _is_base(self, request: GenerateRequest) -> bool:
        """Base output in the adapter's place, as the request allows."""
        return self.degrades and request.fallback_base
