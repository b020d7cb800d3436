"""One whole running system for many cases: adapters go in through the API, numbers and refusals come out of it."""

import asyncio
import io
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

import httpx
import pytest
import urllib3
from minio import Minio

from support.api import Api, Scored
from support.cases import EFFECT_FLOOR, PROMPT, Change, Files, Oracle, config, keyed, modules
from support.s3_proxy import S3Proxy
from support.stacks import StackFactory

LOGPROB_BOUND = 1e-3
TEACHER_FORCED_BOUND = 2e-3
NUM_TOKENS = 16
GOOD = "good"
SMALL_CACHE_BYTES = 40_000
"""Room for about ten of the standard adapters on the LoRA server's disk."""
SMALL_HOST_BYTES = 16_000
"""Room for about four of them in its memory."""


def on(name: str) -> pytest.MarkDecorator:
    """Run a case in the world of this name."""
    return pytest.mark.parametrize("running", [name], indirect=True)


async def each(*checks: Coroutine[Any, Any, Any]) -> None:
    """Variants of one case, together."""
    async with asyncio.TaskGroup() as tasks:
        for check in checks:
            tasks.create_task(check)


@dataclass
class World:
    """A base model served by real processes, with one good adapter that must keep answering."""

    name: str
    oracle: Oracle
    api: Api
    factory: StackFactory
    root: Path
    good: list[Change] = field(default_factory=list)
    proxy: S3Proxy | None = None
    _count: int = 0

    async def settle(self) -> None:
        """Register the good adapter."""
        self.good = await self.made(GOOD, 99)

    async def made(
        self, name: str, seed: int, *, rank: int = 4, std: float = 0.2, leaves: Sequence[str] = ("q_proj", "v_proj")
    ) -> list[Change]:
        """Register an adapter of dense modules, another for each seed; what it changes."""
        loras = self.oracle.loras(modules(*leaves), rank=rank, seed=seed, std=std)
        settings = config(r=rank, lora_alpha=2 * rank, target_modules=list(leaves))
        await self.register(Files(settings, keyed(loras)), name=name)
        return self.oracle.merge(loras, 2.0)

    async def until_ready(self, kind: str, count: int) -> None:
        """Wait until so many processes of a kind are alive and take work."""

        def are_there(fleet: dict[str, Any]) -> bool:
            told = [(m["state"], m["health"]) for m in fleet["members"] if m["kind"] == kind]
            return told.count(("ready", "alive")) == count

        await self.factory.fleet(are_there, within_s=60)

    def place(self, files: Files) -> Path:
        """Write an adapter where the gateway may read it."""
        self._count += 1
        return files.write(self.root / "sources" / str(self._count))

    def put(self, prefix: str, files: Files, *, more: Mapping[str, bytes] | None = None, bucket: str = "") -> str:
        """Lay an adapter into the system's own S3 server, and other objects under their whole names; gives its URI.

        `bucket`: another than the system's own, which is made.
        """
        directory = self.place(files)
        paths = (path for path in directory.rglob("*") if path.is_file())
        objects = {f"{prefix}/{path.relative_to(directory)}": path.read_bytes() for path in paths} | dict(more or {})
        client, own = self.store()
        if bucket:
            client.make_bucket(bucket)
        bucket = bucket or own
        for name, data in objects.items():
            client.put_object(bucket, name, io.BytesIO(data), len(data))
        return f"s3://{bucket}/{quote(prefix)}"

    def setting(self, name: str) -> str:
        """What all services of this system were told."""
        return self.factory.stack._started().shared[f"INFINILORA_{name}"]

    def store(self) -> tuple[Minio, str]:
        """A client of the system's own S3 server, and the bucket."""
        url = urlsplit(self.setting("STORE_URL"))
        options = dict(parse_qsl(url.query))
        endpoint = urlsplit(options["endpoint"])
        keys = (self.setting("S3_ACCESS_KEY"), self.setting("S3_SECRET_KEY"))
        http = urllib3.PoolManager(ca_certs=options.get("ca"))
        is_tls = endpoint.scheme == "https"
        return Minio(endpoint.netloc, *keys, secure=is_tls, region="us-east-1", http_client=http), url.netloc

    async def exact_from(self, uri: str, changes: Iterable[Change], *, name: str) -> dict[str, Any]:
        """`exact`, for an adapter that the gateway reads from the store."""
        changes = list(changes)
        assert self.oracle.effect(changes) >= EFFECT_FLOOR, "this case could not see an adapter that is left out"
        answer = await self.api.http.post("/v1/adapters", json={"name": name, "source": uri})
        assert answer.is_success, answer.text
        await self.serves(name, changes)
        entry: dict[str, Any] = answer.json()
        return entry

    async def register(self, source: Files | Path, *, name: str = "", **extra: Any) -> dict[str, Any]:
        directory = self.place(source) if isinstance(source, Files) else source
        return await self.api.register(name or f"adapter-{directory.name}", directory, **extra)

    async def exact(self, source: Files | Path, changes: Iterable[Change], *, name: str = "") -> dict[str, Any]:
        """The adapter is registered and serves the oracle's numbers, which are far from the base's."""
        changes = list(changes)
        assert self.oracle.effect(changes) >= EFFECT_FLOOR, "this case could not see an adapter that is left out"
        entry = await self.register(source, name=name)
        await self.serves(entry["name"], changes)
        return entry

    async def serves(
        self,
        model: str,
        changes: Iterable[Change] = (),
        *,
        prompt: list[int] = PROMPT,
        max_tokens: int = NUM_TOKENS,
    ) -> Scored:
        """What this model answers equals the oracle with these changes."""
        changes = list(changes)
        scored = await self.api.score(model, prompt, max_tokens=max_tokens)
        wanted = self.oracle.logprobs(prompt, changes)
        worst = max((abs(a - b) for a, b in zip(scored.prompt_logprobs, wanted, strict=True)), default=0.0)
        assert worst <= LOGPROB_BOUND, f"{model}: logprobs of {len(prompt)} tokens differ by {worst}"
        assert len(scored.token_ids) == max_tokens
        self.assert_right(model, prompt, scored.token_ids, changes)
        return scored

    def assert_right(self, model: str, prompt: list[int], tokens: list[int], changes: Iterable[Change] = ()) -> None:
        """Each token that was served after the prompt is the oracle's best, or next to it."""
        shortfall = self.oracle.shortfall(prompt, tokens, changes)
        assert shortfall <= TEACHER_FORCED_BOUND, f"{model}: a served token falls {shortfall} short"

    async def refused(self, source: Files | Path, *says: str, status: Sequence[int] = range(400, 500)) -> str:
        """The adapter is refused in words that hold all of `says`, and nothing of it is listed or served."""
        directory = self.place(source) if isinstance(source, Files) else source
        body = {"name": f"adapter-{directory.name}", "source": f"file://{directory}"}
        return await self.refused_as(body, *says, status=status)

    async def refused_as(self, body: dict[str, Any], *says: str, status: Sequence[int] = range(400, 500)) -> str:
        answer = await self.api.http.post("/v1/adapters", json=body)
        message = error_of(answer, status)["message"]
        missing = [word for word in (body["name"], *says) if word not in message]
        assert not missing, f"{missing} not said in: {message}"
        assert str(self.root) not in message, f"a path of the server in: {message}"
        assert body["name"] not in await self.listed()
        asked = await self.api.http.post("/v1/completions", json={"model": body["name"], "prompt": PROMPT})
        error_of(asked, [404])
        return str(message)

    async def listed(self) -> list[str]:
        return [model["id"] for model in (await self.api.http.get("/v1/models")).json()["data"]]

    async def undisturbed(self, before: dict[str, int | None]) -> None:
        """The same processes live, and the base and the good adapter answer as they should."""
        await asyncio.gather(self.serves("tiny"), self.serves(GOOD, self.good))
        assert self.factory.stack.pids() == before


class Answer(NamedTuple):
    """Tokens, and the logprobs of the prompt's and of these."""

    tokens: list[int]
    logprobs: list[float]


async def base_answer(api: Api) -> Answer:
    """The base's, to 48 tokens."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "echo": True, "logprobs": 1}
    answer = await api.http.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
    choice = answer.raise_for_status().json()["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"][1:])


def error_of(answer: httpx.Response, status: Sequence[int]) -> dict[str, Any]:
    """The one shape of an error."""
    assert answer.status_code in status, f"HTTP {answer.status_code}: {answer.text[:500]}"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) >= {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error
