"""An engine as a real process, and a client of its door."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from infinilora.protocol import generate_pb2 as pb
from infinilora.protocol.ids import PROTOCOL_VERSION, Digest
from infinilora.runtime.rpc import Channels
from support.procs import Server

SERVICE = pb.DESCRIPTOR.services_by_name["Engine"]


class EngineProcess(Server):
    """`python -m infinilora.engine` with settings of the test's choice on top of loopback defaults."""

    name = "engine"
    ready_s = 60.0

    def __init__(self, home: Path, **settings: object) -> None:
        super().__init__(home)
        self.settings = {
            "LISTEN": f"127.0.0.1:{self.port}",
            "VAR_DIR": home / "var",
            "ENGINE_ID": f"engine-{self.port}",
            "THREADS": 1,
            "KV_BLOCK": 4,
            "KV_BYTES": 1 << 20,
            "STEP_TOKENS": 32,
            "POOL_BYTES": 8 << 20,
            "LINK_BUFFER_BYTES": 16 << 10,
            "LINK_BUFFERS": 4,
            "BEAT_MS": 100,
            **settings,
        }

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return str(self.settings["ENGINE_ID"])

    @override
    def command(self) -> list[str]:
        return [sys.executable, "-m", "infinilora.engine"]

    @override
    def environment(self) -> dict[str, str]:
        return {f"INFINILORA_{key}": str(value) for key, value in self.settings.items()} | {"OMP_NUM_THREADS": "1"}

    def wait_end(self) -> int:
        assert self._process is not None
        return self._process.wait(20)


@dataclass
class Answer:
    """All that one call was told. `scores` holds (token, logprob) of prompt positions 1.. and produced tokens."""

    tokens: list[int] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    finished: Any = None


class EngineClient:
    """Calls to one engine."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._client = channels.client(SERVICE, address)

    def stream(self, prompt: list[int], digest: Digest | None = None, **options: Any) -> AsyncGenerator[Any, None]:
        request = make_request(prompt, digest, **options)
        stream: AsyncGenerator[Any, None] = self._client.stream("Generate", request, timeout_s=60)
        return stream

    async def ask(self, prompt: list[int], digest: Digest | None = None, **options: Any) -> Answer:
        answer = Answer()
        async with aclosing(self.stream(prompt, digest, **options)) as events:
            async for event in events:
                take(answer, event)
        return answer

    async def ask_all(self, asked: Sequence[tuple[list[int], Digest | None]], **options: Any) -> list[Answer]:
        """At once, so that they share steps."""
        return list(await asyncio.gather(*(self.ask(p, d, **options) for p, d in asked)))


def take(answer: Answer, event: Any) -> None:
    match event.WhichOneof("event"):
        case "token":
            answer.tokens.append(event.token.id)
            answer.scores.append((event.token.id, event.token.logprob))
        case "prompt_logprobs":
            answer.scores += [(t.id, t.logprob) for t in event.prompt_logprobs.tokens]
        case "finished":
            answer.finished = event.finished


def make_request(
    prompt: list[int],
    digest: Digest | None = None,
    *,
    produced: list[int] | None = None,
    fallback_base: bool = False,
    deadline_ms: int = 0,
    slo_class: str = "",
    protocol_version: int = PROTOCOL_VERSION,
    **sampling: Any,
) -> Any:
    sampling = {"max_tokens": 8, "top_p": 1.0, "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True} | sampling
    return pb.GenerateRequest(
        protocol_version=protocol_version,
        request_id="r",
        token_ids=prompt + (produced or []),
        num_prompt_tokens=len(prompt),
        digest=digest or "",
        deadline_ms=deadline_ms,
        slo_class=slo_class,
        fallback_base=fallback_base,
        sampling=pb.Sampling(**sampling),
    )
