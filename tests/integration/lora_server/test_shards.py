"""The life of a group of several processes: it begins when all are there, and ends as one."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from infinilora.link.errors import LinkRefused
from infinilora.protocol import subjects
from infinilora.protocol.adapter import Site
from infinilora.protocol.control import Beat, GroupLoad
from infinilora.protocol.errors import InvalidRequest, Unavailable
from infinilora.protocol.ids import digest_of
from infinilora.protocol.shards import HEAD, Shape, Sharding
from infinilora.runtime.bus import NatsBus
from support.cards import make_card
from support.lora_groups import LoraGroup
from support.lora_servers import LoraServerProcess, linked_engine
from support.pools import pack
from support.procs import NatsServer, ValkeyServer
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CARD = make_card("llama", num_layers=2)
MakeGroup = Callable[..., LoraGroup]


@pytest.fixture
def make_group(tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer) -> Iterator[MakeGroup]:
    groups: list[LoraGroup] = []

    def make(shape: Shape, **settings: object) -> LoraGroup:
        groups.append(LoraGroup(tmp_path, CARD, shape, nats_server, redis_server, **settings))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, nats_server: NatsServer, redis_server: ValkeyServer
) -> Iterator[LoraGroup]:
    """A group that tests may share: none of them ends it."""
    group = LoraGroup(tmp_path_factory.mktemp("whole"), CARD, Shape(1, 2), nats_server, redis_server)
    group.start()
    yield group
    group.close()


def ended(shard: LoraServerProcess) -> int | None:
    """The exit status of a shard that has ended by itself."""
    return shard._process.poll() if shard._process else None


async def ready(nats: NatsServer, group: LoraGroup) -> Beat:
    """The head's first beat that says it is ready."""
    async with asyncio.timeout(60), NatsBus(nats.url) as bus:
        async for beat in bus.subscribe(subjects.heartbeat("lora-server", group.name), Beat):
            if beat.state == "ready":
                return beat
    raise AssertionError("the beats ended")


async def test_a_group_is_ready_once_all_its_shards_are(make_group: MakeGroup, nats_server: NatsServer) -> None:
    group = make_group(Shape(1, 2))
    group.head.start()
    with pytest.raises(Unavailable, match=r"not whole yet: shards \[1\] are missing"):
        async with linked_engine(group.head, CARD, opens_shards=True):
            pass
    waiting = asyncio.ensure_future(ready(nats_server, group))
    await asyncio.sleep(0)
    assert not waiting.done()
    group.shards[1].start()
    beat = await waiting
    assert isinstance(beat.load, GroupLoad)
    assert (beat.load.shape, beat.address) == ("1x2", group.head.address)
    assert beat.load.bytes_total == 2 * int(str(group.head.settings["POOL_BYTES"]))


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_shards_death_is_the_groups(make_group: MakeGroup, nats_server: NatsServer, lost: int) -> None:
    group = make_group(Shape(3, 1))
    group.start()
    await ready(nats_server, group)
    group.shards[lost].kill()
    others = [shard for shard in group.shards if shard is not group.shards[lost]]
    await eventually(lambda: all(ended(shard) == 1 for shard in others), "the others end")


async def test_a_shard_that_is_asked_to_stop_drains_the_group(make_group: MakeGroup, nats_server: NatsServer) -> None:
    group = make_group(Shape(1, 2))
    group.start()
    await ready(nats_server, group)
    assert await asyncio.to_thread(group.shards[1].stop) == 0
    assert group.head.wait_end() == 0


async def test_a_shard_that_does_not_fit_its_group_says_so_and_ends(make_group: MakeGroup) -> None:
    group = make_group(Shape(1, 2))
    group.shards[1].settings["POOL_BYTES"] = 1 << 20
    group.start()
    await eventually(lambda: ended(group.shards[1]) == 1, "it ends", timeout_s=60)
    said = group.shards[1].log.read_text()
    assert f"pool_bytes is {1 << 20}; the head's {8 << 20}" in said


async def test_an_engine_that_opens_one_link_only_is_refused(whole: LoraGroup, nats_server: NatsServer) -> None:
    await ready(nats_server, whole)
    with pytest.raises(InvalidRequest, match="has 2 shards; this engine is older"):
        async with linked_engine(whole.head, CARD):
            pass


async def test_a_shard_refuses_what_is_anothers(whole: LoraGroup, nats_server: NatsServer, tmp_path: Path) -> None:
    packed = pack(tmp_path, whole.blobs, CARD, seed=1)
    await ready(nats_server, whole)
    sharding = Sharding(Shape(1, 2), CARD.num_layers, CARD.sites)
    assert sharding.dense_shard(1, Site.QKV) != HEAD
    async with linked_engine(whole.head, CARD, opens_shards=True) as engine:
        lease = await engine.lease(packed.digest)
        engine.plan(lease.rows(0, 3))
        x = torch.randn(3, CARD.hidden_dim)
        own = await asyncio.to_thread(engine.site, 0, Site.QKV, x, [CARD.geometry()[0, Site.QKV].out_dim])
        assert own.any()
        engine.plan(lease.rows(0, 3))
        with pytest.raises(LinkRefused, match="of another shard"):
            await asyncio.to_thread(engine.site, 1, Site.QKV, x, [CARD.geometry()[1, Site.QKV].out_dim])


async def test_a_shard_that_is_no_head_grants_no_lease(whole: LoraGroup, nats_server: NatsServer) -> None:
    await ready(nats_server, whole)
    async with linked_engine(whole.shards[1], CARD, opens_shards=True) as engine:
        await engine.ask(digest_of(b"any"))
        with pytest.raises(StopAsyncIteration):
            await engine.hear()
