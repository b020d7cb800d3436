"""An engine of two shards as real processes, each with links to a real LoRA server: its numbers, and its ends."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from infinilora.protocol import keys
from infinilora.protocol.adapter import BaseCard, manifest_digest
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.rpc import Channels
from infinilora.weights.ingest import ingest
from support.engine_process import Answer, EngineClient, EngineProcess, take
from support.lora_servers import LoraServerProcess
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.procs import NatsServer, ValkeyServer, wait_until
from support.tiny_models import make_tiny_model
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TOLERANCE = 1e-3
SHORT, LONG = [5, 6, 7, 8], list(range(3, 60))
NAME = "tiny-in-two"


class House:
    """The engine, its LoRA server, and the store between them."""

    def __init__(self, home: Path, kind: str, nats: NatsServer, redis: ValkeyServer, **settings: object) -> None:
        self.home = home
        self.directory = make_tiny_model(kind, home / "model").directory
        self.oracle = Oracle(self.directory)
        self.blobs = DirectoryBlobs(home / "store")
        (home / "link").mkdir()
        common = {
            "NATS_URL": nats.url,
            "REDIS_URL": redis.url,
            "STORE_URL": f"file://{home / 'store'}",
            "LINK_DIR": home / "link",
        }
        mine = {"MODEL": self.directory, "SERVED_NAME": NAME, "ENGINE_SHARDS": 2, "LOST_PATIENCE_S": 60}
        self.engine = EngineProcess(home / "engine", **{**common, **mine, **settings})
        self.server = LoraServerProcess(home / "lora", **{**common, "BASE": NAME, "GROUP": NAME})

    def push(self, seed: int, *targets: str) -> tuple[Path, Digest]:
        (name,) = [n for n in self.blobs.list("bases/") if n.endswith("card.json")]
        card = msgspec.json.decode(self.blobs.get(name), type=BaseCard)
        source = write_adapter(self.home / f"a{seed}", self.directory, rank=4, targets=targets, seed=seed, std=0.25)
        packed = self.home / f"a{seed}.packed"
        digest = manifest_digest(ingest(source, card, packed))
        self.blobs.put_file(keys.packed(digest), packed)
        return source, digest

    def error(self, asked: list[int], answer: Answer, adapter: Path | None = None) -> float:
        wanted = self.oracle.logprobs(asked + answer.tokens, adapter)
        return max(abs(told - logprob) for (_, told), logprob in zip(answer.scores, wanted, strict=True))

    def shards(self) -> list[int]:
        """The processes that the engine has begun."""
        children = Path(f"/proc/{self.engine.pid}/task").glob("*/children")
        return [int(pid) for file in children for pid in file.read_text().split()]

    def close(self) -> None:
        for process in (self.engine, self.server):
            if process._process is not None:
                process.kill()


@pytest.fixture
def houses(tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer) -> Iterator[list[House]]:
    made: list[House] = []
    yield made
    for house in made:
        house.close()


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    async with Channels() as channels:
        yield channels


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_two_shards_serve_base_and_adapters_over_links_and_outlive_a_lora_server(
    houses: list[House], tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, channels: Channels
) -> None:
    house = House(tmp_path, "qwen2_moe", nats_server, redis_server, PING_PONG="on")
    houses.append(house)
    house.engine.start()
    house.server.start()
    client = EngineClient(channels, house.engine.address)
    await eventually(lambda: bool(house.blobs.list("bases/")), "the card is published")
    everything, first = house.push(1, *ATTENTION, *MLP, "gate", "shared_expert_gate", "lm_head")
    partial, second = house.push(2, "o_proj", "down_proj")
    shards = house.shards()
    assert len(shards) == 1

    answers = await client.ask_all([(LONG, first), (SHORT, None), (LONG, second)])

    assert house.error(LONG, answers[0], everything) < TOLERANCE
    assert house.error(SHORT, answers[1]) < TOLERANCE
    assert house.error(LONG, answers[2], partial) < TOLERANCE
    assert house.oracle.effect(LONG, partial) > 0.1

    told, killed = Answer(), False
    async with aclosing(client.stream(SHORT, first, max_tokens=60)) as events:
        async for event in events:
            take(told, event)
            if len(told.tokens) == 5 and not killed:
                killed = True
                house.server.kill()
                house.server.launch()
    assert len(told.tokens) == 60
    assert house.error(SHORT, told, everything) < TOLERANCE
    assert house.shards() == shards

    assert house.engine.stop() == 0
    await eventually(lambda: is_gone(shards[0]), "the other shard has ended with the head")


async def test_a_shard_that_dies_ends_its_engine(
    houses: list[House], tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, channels: Channels
) -> None:
    house = House(tmp_path, "llama", nats_server, redis_server, LORA="none")
    houses.append(house)
    house.engine.start()
    client = EngineClient(channels, house.engine.address)
    (shard,) = house.shards()

    async def killed_on_the_way() -> None:
        async with aclosing(client.stream(SHORT, max_tokens=240)) as events:
            async for _ in events:
                os.kill(shard, signal.SIGKILL)

    with pytest.raises(Unavailable):
        await killed_on_the_way()
    assert house.engine.wait_end() == 1


async def test_a_head_that_is_killed_takes_its_shards_along(
    houses: list[House], tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer
) -> None:
    house = House(tmp_path, "llama", nats_server, redis_server, LORA="local")
    houses.append(house)
    house.engine.start()
    (shard,) = house.shards()
    house.engine.kill()
    await eventually(lambda: is_gone(shard), "the other shard has ended")


def test_a_model_that_does_not_divide_is_refused_with_what_would(
    houses: list[House], tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer
) -> None:
    house = House(tmp_path, "llama", nats_server, redis_server, LORA="none", ENGINE_SHARDS=3)
    houses.append(house)
    house.engine.launch()
    wait_until(lambda: house.engine._process is not None and house.engine._process.poll() is not None, "it ends", 60)
    assert house.engine.wait_end() == 1
    assert "4 attention heads do not divide by 3; wanted one of 1, 2, 4" in house.engine.log.read_text()
