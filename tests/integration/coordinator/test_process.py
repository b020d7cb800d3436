"""Coordinators as real processes on real NATS and Redis: start, take over, outages, clean stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from infinilora.gateway.ledger import Ledger
from infinilora.gateway.registry import Registry
from infinilora.gateway.versions import Content
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import DigestRecord
from infinilora.protocol.control import Beat, Command, CommandReply, GroupLoad, Stage
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.runtime.blobs import open_blobs
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.members import Heart
from infinilora.runtime.memory import MemoryBus
from infinilora.runtime.placement import read_placement
from infinilora.runtime.store import RedisStore
from support.clusters import BEAT_MS, Cluster, a_cluster
from support.procs import WeedServer
from support.registered import register
from support.s3_proxy import S3Proxy
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

BASE = Fingerprint(digest_of(b"base"))
ADAPTER = digest_of(b"adapter")


class LoraServer:
    """Beats as a group of `BASE` with nothing resident, and notes the commands it is given."""

    def __init__(self, cluster: Cluster) -> None:
        self._url = cluster.nats.url
        self.commands: list[Command] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator["LoraServer"]:
        async with NatsBus(self._url) as bus:
            await bus.wait_connected(5)
            await bus.serve(subjects.commands("lora-server", "g1-0"), Command, self._obey)
            task = asyncio.get_running_loop().create_task(Heart(self._url, self._beat, interval_s=BEAT_MS / 1000).run())
            try:
                yield self
            finally:
                task.cancel()
                await asyncio.wait([task])

    def _beat(self) -> Beat:
        load = GroupLoad(bytes_free=1000, bytes_total=1000)
        return Beat(
            kind="lora-server", id="g1-0", incarnation="x", seq=0, state="ready", base=BASE, group="g1", load=load
        )

    async def _obey(self, command: Command) -> CommandReply:
        self.commands.append(command)
        return CommandReply(command_id=command.command_id)


async def test_a_registered_adapter_is_placed_and_a_hot_one_staged(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster, RedisStore(cluster.valkey.url) as store:
        coordinator = await cluster.coordinator("c1")
        await eventually(coordinator.is_well, "the coordinator is ready", 20)
        async with LoraServer(cluster).running() as server:
            await register(store, "one", ADAPTER, BASE)

            async def is_placed() -> bool:
                found = await read_placement(store, BASE)
                return found is not None and found.placement.groups == {"g1": (ADAPTER,)}

            await eventually(is_placed, "the adapter is placed", 20)
            await store.add_heat(keys.heats([10, 60, 600]), {ADAPTER: 10})
            await eventually(lambda: bool(server.commands), "the hint comes", 20)
            assert server.commands[0].body == Stage(digest=ADAPTER)
            assert server.commands[0].epoch == 1
            fleet = await coordinator.fleet()
            assert {(m["kind"], m["health"]) for m in fleet["members"]} == {
                ("coordinator", "alive"),
                ("lora-server", "alive"),
            }
            assert fleet["leader"] == "c1"
            assert fleet["heat"][0]["name"] == "default/one"


async def test_a_standby_takes_over_from_a_killed_leader_with_a_higher_epoch(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        first = await cluster.coordinator("c1")
        await eventually(first.leads, "the first leads", 20)
        second = await cluster.coordinator("c2")
        await eventually(second.is_well, "the second stands by", 20)
        assert not await second.leads()
        first.kill()
        await eventually(second.leads, "the second leads")
        assert (await second.fleet())["epoch"] == 2


async def test_a_frozen_leader_that_wakes_finds_itself_deposed(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        first = await cluster.coordinator("c1")
        await eventually(first.leads, "the first leads", 20)
        second = await cluster.coordinator("c2")
        first.freeze()
        await eventually(second.leads, "the second leads", 20)
        first.thaw()
        assert not await first.leads()
        assert await second.leads()


async def test_a_frozen_leaders_deletion_comes_too_late_for_what_is_registered_anew(
    tmp_path: Path, s3_server: WeedServer
) -> None:
    """It is stopped with its deletion under way; another leads, deletes, the same content is registered; it goes on."""
    bucket = f"fence-{uuid4().hex[:8]}"
    blobs = open_blobs(s3_server.url(bucket), access_key=s3_server.access_key, secret_key=s3_server.secret_key)
    packed = keys.packed(ADAPTER)
    common = {
        "S3_ACCESS_KEY": s3_server.access_key,
        "S3_SECRET_KEY": s3_server.secret_key,
        "DELETE_GRACE_S": "0",
        "CLOCK_SKEW_S": "0",
    }
    async with a_cluster(tmp_path) as cluster, RedisStore(cluster.valkey.url) as store:
        ledger = Ledger(store, MemoryBus(), Registry(store, MemoryBus()))
        content = Content(BASE, ADAPTER, source="", num_bytes=1, max_rank=1, num_tensors=2, may_replace=True)
        await asyncio.to_thread(blobs.put, packed, b"first")

        async def is_free() -> bool:
            found = await store.get(keys.digest(ADAPTER), DigestRecord)
            return found is None

        with S3Proxy(s3_server.port) as proxy:
            first = await cluster.coordinator("c1", STORE_URL=proxy.url(bucket), **common)
            await eventually(first.leads, "the first leads", 20)
            second = await cluster.coordinator("c2", STORE_URL=s3_server.url(bucket), **common)
            await eventually(second.is_well, "the second stands by", 20)
            with proxy.held(packed, method="DELETE"):
                await ledger.point("default", "one", content)
                await ledger.delete("default", "one")
                await asyncio.to_thread(proxy.wait_held)
                first.freeze()
                await eventually(second.leads, "the second leads", 20)
                with pytest.raises(Unavailable, match="being deleted"):
                    await ledger.point("default", "again", content)
                await eventually(is_free, "the second has deleted it", 25)
                await asyncio.to_thread(blobs.put, packed, b"again")
                await ledger.point("default", "again", content)
            first.thaw()
            await eventually(lambda: bool(proxy.asked("DELETE", packed)), "the first one's deletion is answered", 20)
            assert {seen.status for seen in proxy.asked("DELETE", packed)} == {403}
            await eventually(first.is_well, "the first is well", 20)
        assert await asyncio.to_thread(blobs.get, packed) == b"again"
        found = await store.get(keys.digest(ADAPTER), DigestRecord)
        assert found is not None
        assert found.value == DigestRecord(refs=("default/again@v1",))


async def test_a_coordinator_lives_through_the_death_of_broker_and_store(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster, RedisStore(cluster.valkey.url) as store:
        coordinator = await cluster.coordinator("c1")
        async with LoraServer(cluster).running():
            await eventually(coordinator.leads, "it leads", 20)
            pid = coordinator.pid
            cluster.nats.kill()
            cluster.valkey.kill()

            async def is_degraded() -> bool:
                away: list[str] = (await coordinator.ask("/readyz"))[1]["away"]
                return away == ["nats", "redis"]

            await eventually(is_degraded, "it says what is away", 20)
            await asyncio.to_thread(cluster.valkey.start)
            await asyncio.to_thread(cluster.nats.start)
            await eventually(coordinator.is_well, "it is well again", 20)
            await eventually(coordinator.leads, "it leads again", 20)
            await register(store, "late", ADAPTER, BASE)

            async def is_placed() -> bool:
                found = await read_placement(store, BASE)
                return found is not None and found.placement.groups == {"g1": (ADAPTER,)}

            await eventually(is_placed, "it decides again", 20)
            assert coordinator.pid == pid


async def test_it_starts_while_everything_is_away_and_becomes_ready_when_it_comes(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        cluster.nats.kill()
        cluster.valkey.kill()
        coordinator = await cluster.coordinator("c1")
        status, body = await coordinator.ask("/readyz")
        assert (status, body["status"]) == (503, "starting")
        await asyncio.to_thread(cluster.valkey.start)
        await asyncio.to_thread(cluster.nats.start)
        await eventually(coordinator.is_well, "it is ready", 20)


async def test_sigterm_gives_the_lease_up_and_ends_with_0(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster, RedisStore(cluster.valkey.url) as store:
        coordinator = await cluster.coordinator("c1")
        await eventually(coordinator.leads, "it leads", 20)
        assert await asyncio.to_thread(coordinator.stop) == 0
        assert await store.lease(keys.LEADER) is None
