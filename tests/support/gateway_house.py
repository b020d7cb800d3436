"""A whole gateway on a real port, with scripted engines behind it and the memory twins of bus and store.

async with open_house(tmp_path) as house:
    answer = await house.http.post("/v1/completions", json=...)
"""

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typing_extensions import override

from infinilora.gateway.settings import Settings
from infinilora.gateway.wiring import Connections, Gateway, build
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import AdapterRecord, BaseCard, VersionRecord
from infinilora.protocol.ids import Digest, digest_of
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.members import Members
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.rpc import Channels
from infinilora.runtime.store import Change, Stamp
from infinilora.runtime.telemetry import Telemetry
from infinilora.runtime.watched_blobs import WatchedBlobs
from infinilora.weights.synth import write_peft_adapter
from support.cards import make_card
from support.scripted_engine import ScriptedEngine

TOKEN = "a token of the test"
BEAT_S = 0.1
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with a few merges: most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, the fox"] * 3, trainer)
    return tokenizer


@functools.cache
def whole_words(tokenizer: Tokenizer) -> list[int]:
    """The tokens that are text by themselves: an answer of these has a chunk for each token."""
    return [i for i in range(len(SPECIALS), tokenizer.get_vocab_size()) if "\ufffd" not in tokenizer.decode([i])]


def text_card(tokenizer: Tokenizer) -> BaseCard:
    card = make_card("llama", vocab_size=tokenizer.get_vocab_size())
    return msgspec.structs.replace(card, name="tiny", tokenizer_files=("tokenizer.json", "tokenizer_config.json"))


def bare_card() -> BaseCard:
    return msgspec.structs.replace(make_card("llama"), name="tiny", max_model_len=64)


@dataclass
class House:
    """What a test holds of a running gateway."""

    url: str
    http: httpx.AsyncClient
    gateway: Gateway
    settings: Settings
    card: BaseCard
    tokenizer: Tokenizer | None
    engines: list[ScriptedEngine]
    bus: MemoryBus
    members: Members
    store: MemoryStore
    root: Path

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    def say(self, text: str, digest: str = "") -> list[int]:
        """Make every engine answer with this text under this digest."""
        assert self.tokenizer is not None
        ids: list[int] = self.tokenizer.encode(text).ids
        for engine in self.engines:
            engine.scripts[digest] = ids
        return ids

    async def complete(self, model: str = "tiny", prompt: Any = "the fox", **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": model, "prompt": prompt, **body})

    async def chat(self, model: str = "tiny", content: Any = "the fox", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return await self.http.post("/v1/chat/completions", json={"model": model, "messages": messages, **body})

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The JSON of every event; the last item is "[DONE]" if it came."""
        async with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            return [event async for event in events(answer)]

    def adapter_dir(self, name: str, **options: Any) -> Path:
        return write_peft_adapter(self.root / "adapters" / name, self.card, **{"rank": 4, "seed": 1} | options)

    async def register(self, name: str, **options: Any) -> str:
        """Register a fresh random adapter; its digest."""
        source = self.adapter_dir(name, **options)
        answer = await self.http.post("/v1/adapters", json={"name": name, "source": f"file://{source}"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["digest"])

    async def seed(self, name: str, *, tenant: str = "default", fallback: str = "none") -> Digest:
        """Write an adapter's record as if it had been registered: for tests that need a name and no files."""
        digest = digest_of(f"{tenant}/{name}".encode())
        version = VersionRecord(
            version=1,
            digest=digest,
            created_at="2026-01-02T03:04:05+00:00",
            source="test",
            num_bytes=1,
            max_rank=4,
        )
        record = AdapterRecord(
            tenant=tenant,
            name=name,
            base=self.card.fingerprint,
            revision=1,
            current=digest,
            versions=(version,),
            fallback=fallback,
        )
        stamp = Stamp(keys.REGISTRY_JOURNAL, keys.adapter_entry(tenant, name), keys.REGISTRY_REVISION)
        assert await self.store.swap([Change(keys.adapter(tenant, name), None, record)], also=[stamp])
        await self.gateway.registry.refresh()
        return digest

    async def until_idle(self, within_s: float = 5.0) -> None:
        """Wait until no engine runs and no place is taken."""
        async with asyncio.timeout(within_s):
            while self.gateway.admission.num_running or any(engine.running for engine in self.engines):
                await asyncio.sleep(0.01)


async def events(answer: httpx.Response) -> AsyncIterator[Any]:
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            yield "[DONE]"
        elif line:
            assert line.startswith("data: "), line
            yield json.loads(line.removeprefix("data: "))


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object of an answer; checks its shape."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


@asynccontextmanager
async def open_house(
    root: Path,
    *,
    engines: int = 1,
    is_asleep: bool = False,
    socket_bytes: int = 0,
    with_text: bool = True,
    telemetry: Telemetry | None = None,
    **settings: Any,
) -> AsyncIterator[House]:
    """Start everything, wait until it is ready, and end all of it. `is_asleep`: as the coordinator says of the base.

    `socket_bytes`: what the kernel takes of an answer that nobody reads; 0: as it likes.
    """
    tokenizer = byte_tokenizer() if with_text else None
    card = text_card(tokenizer) if tokenizer else bare_card()
    bus, store, blobs = MemoryBus(), MemoryStore(), DirectoryBlobs(root / "store")
    publish_base(blobs, card, tokenizer)
    if is_asleep:
        await store.put(keys.ASLEEP, {card.fingerprint: card.name})
    made = functools.partial(ScriptedEngine, card.fingerprint, card.name, card.vocab_size, EOS)
    crew = [made(id=f"engine-{i}", words=whole_words(tokenizer) if tokenizer else ()) for i in range(engines)]
    async with AsyncExitStack() as stack:
        members = await stack.enter_async_context(Members(bus, interval_s=BEAT_S * 4))
        for engine in crew:
            await stack.enter_async_context(engine.served(TOKEN))
        channels = await stack.enter_async_context(Channels(token=TOKEN))
        configured = house_settings(root, settings)
        ties = Connections(bus, store, WatchedBlobs(blobs), members, channels, telemetry or Telemetry())
        gateway = build(configured, ties)
        url = await stack.enter_async_context(_running(gateway, bus, crew, socket_bytes))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, trust_env=False))
        house = House(url, http, gateway, configured, card, tokenizer, crew, bus, members, store, root)
        async with asyncio.timeout(10):
            while (await http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.02)
        yield house


def house_settings(root: Path, more: dict[str, Any]) -> Settings:
    own: dict[str, Any] = {
        "nats_url": "nats://127.0.0.1:1",
        "redis_url": "redis://127.0.0.1:1",
        "store_url": f"file://{root}/store",
        "var_dir": root / "var",
        "adapter_roots": str(root / "adapters"),
        "patience_s": 2.0,
    }
    return Settings(**own | more)


def publish_base(blobs: DirectoryBlobs, card: BaseCard, tokenizer: Tokenizer | None) -> None:
    """What an engine would put into the store."""
    blobs.put(keys.base_card(card.fingerprint), msgspec.json.encode(card))
    if tokenizer:
        config = {"chat_template": TEMPLATE, "bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
        blobs.put(keys.base_file(card.fingerprint, "tokenizer.json"), tokenizer.to_str().encode())
        blobs.put(keys.base_file(card.fingerprint, "tokenizer_config.json"), json.dumps(config).encode())


@asynccontextmanager
async def _running(
    gateway: Gateway, bus: MemoryBus, engines: Sequence[ScriptedEngine], socket_bytes: int
) -> AsyncIterator[str]:
    server = _Server(uvicorn.Config(gateway.app, log_config=None, access_log=False, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if socket_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, socket_bytes)
        async with asyncio.TaskGroup() as group:
            side = [group.create_task(task()) for task in gateway.background.values()]
            side.append(group.create_task(_beat(bus, engines)))
            web = group.create_task(server.serve([listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await web
                for task in side:
                    task.cancel()


class _Server(uvicorn.Server):
    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield


async def _beat(bus: MemoryBus, engines: Sequence[ScriptedEngine]) -> None:
    seq = 0
    while True:
        seq += 1
        for engine in engines:
            await bus.publish(subjects.heartbeat("engine", engine.id), engine.beat(seq))
        await asyncio.sleep(BEAT_S)
