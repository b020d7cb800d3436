"""The engine as a real process: real NATS, Redis and store, real LoRA servers, spoken to over gRPC."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

import msgspec
import pytest

from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import BaseCard, manifest_digest
from infinilora.protocol.control import Beat, Command, CommandReply, Drain, EngineLoad, Evict
from infinilora.protocol.errors import (
    AdapterFailed,
    AdapterNotFound,
    ContextLengthExceeded,
    DeadlineExceeded,
    InfiniLoraError,
    InvalidRequest,
    StaleEpoch,
    Unavailable,
)
from infinilora.protocol.ids import Digest, digest_of
from infinilora.runtime.blobs import BlobStore, open_blobs
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.rpc import Channels
from infinilora.weights.ingest import ingest
from support.engine_process import Answer, EngineClient, EngineProcess
from support.lora_servers import LoraServerProcess
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.procs import NatsServer, ValkeyServer
from support.tiny_models import TinyModel, make_tiny_model
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TOLERANCE = 1e-3
SHORT, LONG = [5, 6, 7, 8], list(range(3, 60))


class World:
    """One engine of a tiny model, its LoRA server if it wants one, and what is around them."""

    def __init__(self, home: Path, model: TinyModel, nats: NatsServer, redis: ValkeyServer, **settings: object) -> None:
        self.home = home
        self.model = model
        self.nats = nats
        self.oracle = Oracle(model.directory)
        self.blobs: BlobStore = open_blobs(f"file://{home / 'store'}")
        (home / "link").mkdir(parents=True)
        common = {
            "NATS_URL": nats.url,
            "REDIS_URL": redis.url,
            "STORE_URL": f"file://{home / 'store'}",
            "LINK_DIR": home / "link",
        }
        name = f"tiny-{os.urandom(4).hex()}"
        self.engine = EngineProcess(
            home / "engine", **{**common, "MODEL": model.directory, "SERVED_NAME": name, "LORA": "none", **settings}
        )
        backends = {"LINK_BACKENDS": settings["LINK_BACKENDS"]} if "LINK_BACKENDS" in settings else {}
        self.server = LoraServerProcess(home / "lora", **{**common, "BASE": name, "GROUP": name, **backends})

    def start(self, *, server: bool = False) -> None:
        self.engine.start()
        if server:
            self.server.start()

    def stop(self) -> None:
        for process in (self.engine, self.server):
            if process._process is not None:
                process.kill()

    @property
    def card(self) -> BaseCard:
        (name,) = [n for n in self.blobs.list("bases/") if n.endswith("card.json")]
        return msgspec.json.decode(self.blobs.get(name), type=BaseCard)

    async def published(self) -> BaseCard:
        await eventually(lambda: any(n.endswith("card.json") for n in self.blobs.list("bases/")), "a base card")
        return self.card

    async def push(self, seed: int, *, rank: int, targets: tuple[str, ...]) -> tuple[Path, Digest]:
        card = await self.published()
        source = write_adapter(
            self.home / f"a{seed}", self.model.directory, rank=rank, targets=targets, seed=seed, std=0.25
        )
        packed = self.home / f"a{seed}.packed"
        digest = manifest_digest(ingest(source, card, packed))
        self.blobs.put_file(keys.packed(digest), packed)
        return source, digest

    def error(self, prompt: list[int], answer: Answer, adapter: Path | None = None) -> float:
        logprobs = self.oracle.logprobs(prompt + answer.tokens, adapter)
        assert len(answer.scores) == len(logprobs)
        told = [logprob for _, logprob in answer.scores]
        return max(abs(a - b) for a, b in zip(told, logprobs, strict=True))

    async def order(self, body: Drain | Evict, *, epoch: int = 1) -> CommandReply:
        async with NatsBus(self.nats.url) as bus:
            await bus.wait_connected(5)
            command = Command(command_id="c", epoch=epoch, body=body)
            return await bus.request(subjects.commands("engine", self.engine.id), command, CommandReply, timeout_s=5)

    async def load_that(self, is_it: Callable[[Beat, EngineLoad], bool]) -> Beat:
        async with asyncio.timeout(10), NatsBus(self.nats.url) as bus:
            async for beat in bus.subscribe(subjects.heartbeat("engine", self.engine.id), Beat):
                assert isinstance(beat.load, EngineLoad)
                if is_it(beat, beat.load):
                    return beat
        raise AssertionError("the beats ended")


MakeWorld = Callable[..., World]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    root, made = tmp_path_factory.mktemp("models"), dict[str, TinyModel]()

    def model(name: str) -> TinyModel:
        if name not in made:
            made[name] = make_tiny_model(name, root / name)
        return made[name]

    return model


@pytest.fixture
def make_world(
    tmp_path: Path, models: Callable[[str], TinyModel], nats_server: NatsServer, redis_server: ValkeyServer
) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(name: str = "llama", *, nats: NatsServer | None = None, **settings: object) -> World:
        home = tmp_path / f"w{len(worlds)}"
        worlds.append(World(home, models(name), nats or nats_server, redis_server, **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.stop()


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    async with Channels() as channels:
        yield channels


async def test_base_traffic_and_every_refusal_of_one_engine(make_world: MakeWorld, channels: Channels) -> None:
    world = make_world()
    world.start()
    client = EngineClient(channels, world.engine.address)

    long, short = await client.ask_all([(LONG, None), (SHORT, None)])
    assert world.error(LONG, long) < TOLERANCE
    assert world.error(SHORT, short) < TOLERANCE
    assert (short.finished.reason, short.finished.completion_tokens) == ("length", 8)

    continued = await client.ask(SHORT, produced=short.tokens[:3], prompt_logprobs=-1)
    assert continued.tokens == short.tokens[3:]
    scored = await client.ask(LONG, max_tokens=0)
    assert scored.tokens == []
    assert world.error(LONG, scored) < TOLERANCE

    refused: list[tuple[type[InfiniLoraError], dict[str, object], str]] = [
        (InvalidRequest, {"prompt": []}, "wanted at least one"),
        (InvalidRequest, {"prompt": [1, 128]}, "token id 128"),
        (ContextLengthExceeded, {"prompt": LONG, "max_tokens": 250}, "at most 256"),
        (InvalidRequest, {"prompt": SHORT, "temperature": float("nan")}, "temperature"),
        (InvalidRequest, {"prompt": SHORT, "digest": "sha256:short"}, "not a digest"),
        (InvalidRequest, {"prompt": SHORT, "protocol_version": 9}, "protocol version"),
        (AdapterNotFound, {"prompt": SHORT, "digest": digest_of(b"none")}, "without adapters"),
        (DeadlineExceeded, {"prompt": SHORT, "deadline_ms": 1, "max_tokens": 200}, "deadline"),
    ]
    for kind, options, words in refused:
        with pytest.raises(kind, match=words):
            await client.ask(**options)  # type: ignore[arg-type]  # a table of keyword arguments

    degraded = await client.ask(SHORT, digest_of(b"none"), fallback_base=True)
    assert degraded.tokens == short.tokens
    assert degraded.finished.degraded
    await world.load_that(lambda _, load: load.running == 0 and load.kv_blocks_free == load.kv_blocks_total)


async def test_a_client_that_leaves_frees_its_place_at_once(make_world: MakeWorld, channels: Channels) -> None:
    world = make_world(KV_BYTES=1 << 20)
    world.start()
    client = EngineClient(channels, world.engine.address)
    for _ in range(3):
        async with aclosing(client.stream(SHORT, max_tokens=240)) as events:
            await anext(events)
    await world.load_that(lambda _, load: load.running == 0 and load.kv_blocks_free == load.kv_blocks_total)


async def test_a_drain_command_refuses_new_work_and_a_stop_finishes_what_runs(
    make_world: MakeWorld, channels: Channels
) -> None:
    world = make_world()
    world.start()
    client = EngineClient(channels, world.engine.address)
    await world.published()
    await world.order(Drain(), epoch=5)
    with pytest.raises(Unavailable, match="draining"):
        await client.ask(SHORT)
    await world.load_that(lambda beat, _: beat.state == "draining")
    with pytest.raises(StaleEpoch):
        await world.order(Drain(draining=False), epoch=4)
    with pytest.raises(InvalidRequest, match="evict"):
        await world.order(Evict(digest=digest_of(b"x")), epoch=5)
    await world.order(Drain(draining=False), epoch=5)

    async with aclosing(client.stream(SHORT, max_tokens=100)) as events:
        answer = [await anext(events)]
        os.kill(world.engine.pid, signal.SIGTERM)
        answer += [event async for event in events]
    assert answer[-1].finished.completion_tokens == 100
    assert await asyncio.to_thread(world.engine.wait_end) == 0


@pytest.mark.parametrize(
    ("name", "mode", "settings"),
    [
        ("llama", "remote", {}),
        ("llama", "remote", {"LINK_BACKENDS": "tcp"}),
        ("llama", "local", {}),
        ("llama", "remote", {"HYBRID_BYTES": 1 << 20}),
        ("qwen2_moe", "remote", {}),
        ("mixtral", "local", {}),
    ],
    ids=["shm", "tcp", "local", "hybrid", "moe-shm", "moe-local"],
)
async def test_adapters_equal_the_oracle_beside_base_rows(
    make_world: MakeWorld, channels: Channels, name: str, mode: str, settings: dict[str, object]
) -> None:
    world = make_world(name, LORA=mode, **settings)
    world.start(server=mode == "remote")
    mlp = ("w1", "w2", "w3") if name == "mixtral" else MLP
    adapters = [
        await world.push(1, rank=4, targets=ATTENTION),
        await world.push(2, rank=16, targets=mlp),
        await world.push(3, rank=8, targets=(*ATTENTION, *mlp)),
    ]
    client = EngineClient(channels, world.engine.address)
    asked = [(prompt, digest) for _, digest in adapters for prompt in (SHORT, LONG)] + [(SHORT, None), (LONG, None)]
    paths = [path for path, _ in adapters for _ in range(2)] + [None, None]

    answers = await client.ask_all(asked)

    for (prompt, _), path, answer in zip(asked, paths, answers, strict=True):
        assert world.error(prompt, answer, path) < TOLERANCE
        if path is not None:
            assert world.oracle.effect(prompt, path) > 0.3
            assert world.error(prompt, answer, None) > 100 * TOLERANCE
    beat = await world.load_that(lambda _, load: load.running == 0 and not load.digests)
    assert isinstance(beat.load, EngineLoad)
    if not settings.get("HYBRID_BYTES"):  # what is in a pool of the engine's own stays there, and is told
        assert set(beat.load.resident) == ({digest for _, digest in adapters} if mode == "local" else set())


async def test_an_unknown_digest_fails_and_the_next_request_does_not(make_world: MakeWorld, channels: Channels) -> None:
    world = make_world(LORA="remote")
    world.start(server=True)
    _, digest = await world.push(1, rank=4, targets=ATTENTION)
    client = EngineClient(channels, world.engine.address)
    with pytest.raises(InfiniLoraError) as refused:
        await client.ask(SHORT, digest_of(b"never stored"))
    assert refused.value.code in ("adapter_failed", "adapter_not_found")
    assert len((await client.ask(SHORT, digest)).tokens) == 8


async def test_a_killed_lora_server_fails_its_streams_in_time_and_spares_the_base(
    make_world: MakeWorld, channels: Channels
) -> None:
    world = make_world(LORA="remote")
    world.start(server=True)
    path, digest = await world.push(1, rank=4, targets=ATTENTION)
    client = EngineClient(channels, world.engine.address)
    base = partial(client.ask, SHORT, max_tokens=60)
    async with aclosing(client.stream(SHORT, digest, max_tokens=240)) as events:
        for _ in range(5):
            await anext(events)
        world.server.kill()
        beside = asyncio.ensure_future(base())
        with pytest.raises(AdapterFailed):
            await asyncio.wait_for(_listen(events), 2.5)
    assert len((await beside).tokens) == 60

    world.server.start()
    answer = await client.ask(SHORT, digest)
    assert world.error(SHORT, answer, path) < TOLERANCE


async def _listen(events: AsyncIterator[object]) -> None:
    async for _ in events:
        pass


async def test_without_its_bus_an_engine_serves_on(make_world: MakeWorld, channels: Channels, tmp_path: Path) -> None:
    nats = NatsServer(tmp_path / "nats")
    nats.start()
    try:
        world = make_world(LORA="remote", nats=nats)
        world.start(server=True)
        path, digest = await world.push(1, rank=4, targets=ATTENTION)
        client = EngineClient(channels, world.engine.address)
        await client.ask(SHORT, digest)
        nats.kill()
        answer = await client.ask(LONG, digest)
        assert world.error(LONG, answer, path) < TOLERANCE
        nats.start()
        await world.load_that(lambda beat, _: beat.state == "ready")
    finally:
        nats.kill()
