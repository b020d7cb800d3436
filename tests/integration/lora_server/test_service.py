"""The lora-server as a real process with real NATS, Redis and S3 servers, spoken to over the real link."""

import asyncio
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from infinilora.link.errors import LinkRefused
from infinilora.link.frame import PlanSegment
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.control import Beat, Command, CommandReply, Drain, Evict, GroupLoad, Pin, Stage
from infinilora.protocol.errors import (
    AdapterFailed,
    Conflict,
    InfiniLoraError,
    InvalidRequest,
    StaleEpoch,
    Unavailable,
)
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import BlobStore, open_blobs
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.store import RedisStore
from support.cards import make_card
from support.lora_servers import LinkedEngine, LoraServerProcess, linked_engine
from support.pools import Packed, pack, rows_of
from support.procs import NatsServer, ValkeyServer, WeedServer, free_port
from support.scaled import pack_scaled
from support.waiting import eventually

pytestmark = pytest.mark.integration

CARD = make_card("llama", num_layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16)
MOE_CARD = make_card("qwen3_moe", num_layers=2, num_experts=4, intermediate=24)
SHARED_CARD = make_card("qwen2_moe", num_layers=2, num_experts=4, intermediate=24, shared_intermediate=40)
EPOCH = 1_000_000
"""Beyond those that leaders of other tests on this store have raised."""
SITES = (Site.QKV, Site.O, Site.GATE_UP, Site.DOWN)


class World:
    """One lora-server and what is around it."""

    def __init__(self, tmp_path: Path, nats: NatsServer, redis: ValkeyServer, s3: WeedServer, card: BaseCard) -> None:
        self.work = tmp_path
        self.nats = nats
        self.redis = redis
        self.card = card
        bucket = f"t{os.urandom(6).hex()}"
        self.blobs: BlobStore = open_blobs(s3.url(bucket), access_key=s3.access_key, secret_key=s3.secret_key)
        self.blobs.put(keys.base_card(card.fingerprint), msgspec.json.encode(card))
        self.group = f"lora-{os.urandom(4).hex()}"
        self.server = LoraServerProcess(
            tmp_path / "server",
            BASE=card.fingerprint,
            GROUP=self.group,
            NATS_URL=nats.url,
            REDIS_URL=redis.url,
            STORE_URL=s3.url(bucket),
            S3_ACCESS_KEY=s3.access_key,
            S3_SECRET_KEY=s3.secret_key,
            METRICS_LISTEN=f"127.0.0.1:{free_port()}",
        )

    def pack(self, seed: int, **options: object) -> Packed:
        return pack(self.work, self.blobs, self.card, seed=seed, **options)  # type: ignore[arg-type]  # as given

    async def order(self, body: Stage | Evict | Pin | Drain, *, epoch: int) -> None:
        """Send a command as a leader of this epoch would. Raises what the server said."""
        refusal: InfiniLoraError | None = None
        async with NatsBus(self.nats.url) as bus:
            await bus.wait_connected(5)
            command = Command(command_id="c", epoch=epoch, body=body)
            try:
                subject = subjects.commands("lora-server", self.group)
                await bus.request(subject, command, CommandReply, timeout_s=5)
            except InfiniLoraError as error:
                refusal = error
        if refusal:
            raise refusal

    async def beat_that(self, is_it: Callable[[Beat, GroupLoad], bool]) -> None:
        """Wait for a beat of which this is true."""
        async with NatsBus(self.nats.url) as bus, asyncio.timeout(10):
            async for beat in bus.subscribe(subjects.heartbeat("lora-server", self.group), Beat):
                assert isinstance(beat.load, GroupLoad)
                if is_it(beat, beat.load):
                    return


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, nats_server: NatsServer, redis_server: ValkeyServer, s3_server: WeedServer
) -> Iterator[World]:
    """Shared by the tests that leave the server as it was."""
    world = World(tmp_path_factory.mktemp("world"), nats_server, redis_server, s3_server, CARD)
    world.server.start()
    yield world
    world.server.stop()


@pytest.fixture
def mortal(
    tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, s3_server: WeedServer
) -> Iterator[World]:
    """For one test alone, which may kill the server."""
    world = World(tmp_path, nats_server, redis_server, s3_server, CARD)
    world.server.start()
    yield world
    world.server.stop()


def check_dense(engine: LinkedEngine, adapters: list[Packed], *, rows: int = 3) -> None:
    """One step over all layers and sites with `rows` rows of each adapter equals the unpacked weights."""
    leases = [engine.leases[a.digest] for a in adapters]
    engine.plan(*(lease.rows(i * rows, rows) for i, lease in enumerate(leases)))
    for layer in range(CARD.num_layers):
        for site in SITES:
            geometry = CARD.geometry()[layer, site]
            x = rows_of(rows * len(adapters), cols=geometry.in_dim, seed=layer)
            out = engine.site(layer, site, x, (geometry.out_dim,))
            for i, adapter in enumerate(adapters):
                mine = slice(i * rows, (i + 1) * rows)
                np.testing.assert_allclose(out[mine], adapter.delta(layer, site, x[mine].numpy()), atol=1e-4)
                if len(adapters) > 1:
                    wrong = adapters[i - 1].delta(layer, site, x[mine].numpy())
                    assert np.abs(out[mine].numpy() - wrong).max() > 1e-2


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_a_mixed_step_over_the_link_equals_the_unpacked_weights(world: World, backend: str) -> None:
    adapters = [world.pack(seed, rank=rank) for seed, rank in enumerate((4, 8, 16, 64))]
    async with linked_engine(world.server, CARD, backends=[backend]) as engine:
        assert engine.backend == backend
        for adapter in adapters:
            await engine.lease(adapter.digest)
        check_dense(engine, adapters)
        check_dense(engine, adapters, rows=40)


async def test_a_routed_step_over_the_link_equals_the_unpacked_weights(
    tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, s3_server: WeedServer
) -> None:
    world = World(tmp_path, nats_server, redis_server, s3_server, MOE_CARD)
    adapter = world.pack(1)
    world.server.start()
    try:
        async with linked_engine(world.server, MOE_CARD) as engine:
            lease = await engine.lease(adapter.digest)
            engine.plan(lease.rows(0, 5))
            check_routed(engine, adapter)
    finally:
        world.server.stop()


async def test_an_engine_that_is_older_than_a_site_gets_no_lease_that_needs_it(
    tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, s3_server: WeedServer
) -> None:
    world = World(tmp_path, nats_server, redis_server, s3_server, SHARED_CARD)
    gate, plain = world.pack(1), world.pack(2, targets=["q_proj", "gate_proj"])
    world.server.start()
    try:
        async with linked_engine(world.server, SHARED_CARD, sites=0) as old:
            with pytest.raises(AdapterFailed, match="adapts site shared_gate of layer 0"):
                await old.lease(gate.digest)
            await old.lease(plain.digest)
            await world.beat_that(lambda _, load: load.leases == 1)
        async with linked_engine(world.server, SHARED_CARD) as engine:
            lease = await engine.lease(gate.digest)
            engine.plan(lease.rows(0, 3))
            x = rows_of(3, cols=32)
            out = engine.site(1, Site.SHARED_GATE, x, (1,))
            np.testing.assert_allclose(out, gate.delta(1, Site.SHARED_GATE, x.numpy()), atol=1e-4)
    finally:
        world.server.stop()


async def test_column_scales_come_with_the_lease_and_only_to_engines_that_apply_them(world: World) -> None:
    adapter = pack_scaled(world.work, world.blobs, CARD, seed=70, targets=["q_proj", "down_proj"])
    async with linked_engine(world.server, CARD, scales_columns=False) as old:
        with pytest.raises(AdapterFailed, match="scales columns of the base's output"):
            await old.lease(adapter.digest)
    async with linked_engine(world.server, CARD) as engine:
        lease = await engine.lease(adapter.digest)
        found = {(layer, Site(site)): factors for (_, layer, site), factors in engine.scales.items()}
        assert found.keys() == adapter.factors.keys()
        for place, factors in adapter.factors.items():
            np.testing.assert_array_equal(found[place], factors)
        engine.plan(lease.rows(0, 3))
        x = rows_of(3, cols=64)
        out = engine.site(1, Site.QKV, x, (128,))
        np.testing.assert_allclose(out, adapter.delta(1, Site.QKV, x.numpy()), rtol=1e-4, atol=1e-4)
        await engine.release(adapter.digest)


def check_routed(engine: LinkedEngine, adapter: Packed) -> None:
    ids = torch.tensor([[0, 1], [2, 3], [1, 3], [3, 0], [2, 1]], dtype=torch.int32)
    weights, x, act = torch.rand(5, 2), rows_of(5, cols=32), rows_of(10, cols=24).view(5, 2, 24)
    up = engine.site(1, Site.MOE_GATE_UP, x, (2, 48), topk_ids=ids)
    down = engine.site(1, Site.MOE_DOWN, act, (32,), topk_ids=ids, topk_weights=weights)
    for t in range(5):
        summed = np.zeros(32)
        for j in range(2):
            module = f"model.layers.1.mlp.experts.{ids[t, j]}"
            gate, up_ = (adapter.deltas[f"{module}.{name}_proj"] @ x[t].numpy() for name in ("gate", "up"))
            np.testing.assert_allclose(up[t, j], np.concatenate([gate, up_]), atol=1e-4)
            summed += weights[t, j].item() * (adapter.deltas[f"{module}.down_proj"] @ act[t, j].numpy())
        np.testing.assert_allclose(down[t], summed, atol=1e-4)


async def test_a_plan_of_an_old_tenancy_or_of_another_engines_lease_is_refused(world: World) -> None:
    adapter = world.pack(1)
    x = rows_of(2, cols=CARD.hidden_dim)
    async with linked_engine(world.server, CARD) as one, linked_engine(world.server, CARD, engine_id="b") as other:
        lease = await one.lease(adapter.digest)
        for segment in (
            PlanSegment(0, 2, lease.slot, lease.slot_generation - 1),
            PlanSegment(0, 2, lease.slot, lease.slot_generation + 1),
            PlanSegment(0, 2, lease.slot + 1, lease.slot_generation),
        ):
            one.plan(segment)
            with pytest.raises(LinkRefused) as refused:
                one.site(0, Site.O, x, (64,))
            assert refused.value.refusal.code == AdapterFailed.code
        other.plan(lease.rows(0, 2))
        with pytest.raises(LinkRefused, match="no lease"):
            other.site(0, Site.O, x, (64,))
        check_dense(one, [adapter])


async def test_a_lease_given_up_is_refused_though_the_adapter_is_still_there(world: World) -> None:
    adapter = world.pack(1)
    async with linked_engine(world.server, CARD) as engine:
        lease = await engine.lease(adapter.digest)
        await engine.release(adapter.digest)
        await world.beat_that(lambda _, load: adapter.digest in load.resident and load.leases == 0)
        engine.plan(lease.rows(0, 2))
        with pytest.raises(LinkRefused, match="no lease"):
            engine.site(0, Site.O, rows_of(2, cols=64), (64,))
        await engine.lease(adapter.digest)
        check_dense(engine, [adapter])


async def test_a_call_that_does_not_fit_is_refused_and_the_link_lives_on(world: World) -> None:
    adapter = world.pack(1)
    async with linked_engine(world.server, CARD) as engine:
        lease = await engine.lease(adapter.digest)
        engine.plan(lease.rows(0, 2))
        with pytest.raises(LinkRefused) as refused:
            engine.site(0, Site.O, rows_of(2, cols=60), (64,))
        assert refused.value.refusal.code == InvalidRequest.code
        engine.plan(lease.rows(0, 2))
        with pytest.raises(LinkRefused, match="layer 77"):
            engine.site(77, Site.O, rows_of(2, cols=64), (64,))
        check_dense(engine, [adapter])


async def test_an_unknown_digest_fails_and_others_are_served(world: World) -> None:
    adapter = world.pack(1)
    async with linked_engine(world.server, CARD) as engine:
        with pytest.raises(AdapterFailed, match="not in the object store"):
            await engine.lease(Digest("sha256:" + "0" * 64))
        await engine.lease(adapter.digest)
        check_dense(engine, [adapter])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"fingerprint": "sha256:" + "1" * 64}, Conflict), ({"protocol_version": 9}, InvalidRequest)],
)
async def test_an_engine_of_another_base_or_protocol_is_refused_by_name(
    world: World, wrong: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        async with linked_engine(world.server, CARD, **wrong):  # type: ignore[arg-type]  # as parametrised
            pass


async def test_an_engine_that_dies_leaves_no_lease_and_no_file(world: World) -> None:
    adapter = world.pack(1)
    async with linked_engine(world.server, CARD) as engine:
        await engine.lease(adapter.digest)
        await world.beat_that(lambda _, load: load.leases == 1)
    await world.beat_that(lambda _, load: load.leases == 0)
    assert os.listdir(str(world.server.settings["LINK_DIR"])) == []  # noqa: PTH208 - a few names


async def test_a_killed_server_ends_the_link_at_once_and_its_next_life_serves_a_new_one(mortal: World) -> None:
    adapter = mortal.pack(1)
    async with linked_engine(mortal.server, CARD) as engine:
        old = await engine.lease(adapter.digest)
        mortal.server.kill()
        with pytest.raises(Unavailable):
            await engine.hear()
    mortal.server.start()
    async with linked_engine(mortal.server, CARD) as engine:
        new = await engine.lease(adapter.digest)
        assert (new.slot, new.slot_generation) != (old.slot, old.slot_generation)
        check_dense(engine, [adapter])


async def test_commands_stage_pin_and_evict_and_a_deposed_leader_is_refused(world: World) -> None:
    adapter = world.pack(1)
    await world.order(Stage(digest=adapter.digest), epoch=EPOCH + 5)
    await world.beat_that(lambda _, load: adapter.digest in load.resident)
    with pytest.raises(StaleEpoch, match="was deposed"):
        await world.order(Evict(digest=adapter.digest), epoch=EPOCH + 4)
    await world.order(Pin(digest=adapter.digest, pinned=True), epoch=EPOCH + 5)
    await world.order(Evict(digest=adapter.digest), epoch=EPOCH + 5)
    await world.beat_that(lambda _, load: adapter.digest in load.resident)
    await world.order(Pin(digest=adapter.digest, pinned=False), epoch=EPOCH + 6)
    await world.order(Evict(digest=adapter.digest), epoch=EPOCH + 6)
    await world.beat_that(lambda _, load: adapter.digest not in load.resident)


async def test_what_an_operator_counts_is_scraped(world: World) -> None:
    adapter = world.pack(1)
    async with linked_engine(world.server, CARD) as engine:
        await engine.lease(adapter.digest)
        check_dense(engine, [adapter])
        url = f"http://{world.server.settings['METRICS_LISTEN']}/metrics"
        page = (await asyncio.to_thread(urllib.request.urlopen, url, timeout=5)).read().decode()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values['infinilora_pool_loads_total{outcome="resident"}']) >= 1
    assert float(values["infinilora_pool_leases"]) == 1
    assert float(values["infinilora_links_open"]) == 1
    assert float(values["infinilora_lora_site_seconds_count"]) >= CARD.num_layers * len(SITES)


async def test_a_deposed_leader_is_known_from_the_store_before_any_command(
    tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, s3_server: WeedServer
) -> None:
    async with RedisStore(redis_server.url) as store:
        epoch = await store.counter(keys.EPOCH)
        for _ in range(2):
            epoch = await store.acquire_lease(f"test:{os.urandom(4).hex()}", "me", 60) or epoch
    world = World(tmp_path, nats_server, redis_server, s3_server, CARD)
    world.server.start()
    try:
        await world.beat_that(lambda beat, _: beat.state == "ready")
        with pytest.raises(StaleEpoch):
            await world.order(Drain(), epoch=epoch - 1)
    finally:
        world.server.stop()


async def test_residency_is_in_the_store_with_a_time_to_live(world: World) -> None:
    adapter = world.pack(1)
    await world.order(Stage(digest=adapter.digest), epoch=EPOCH + 9)
    async with RedisStore(world.redis.url) as store, asyncio.timeout(10):
        while True:
            found = await store.get(keys.residency(world.group), list[str])
            if found and adapter.digest in found.value:
                break
            await asyncio.sleep(0.05)


async def test_a_drained_group_grants_nothing_new_and_goes_on_with_what_runs(world: World) -> None:
    adapter, late = world.pack(1), world.pack(2)
    async with linked_engine(world.server, CARD) as engine:
        await engine.lease(adapter.digest)
        await world.order(Drain(), epoch=EPOCH + 9)
        with pytest.raises(Unavailable):
            await engine.lease(late.digest)
        check_dense(engine, [adapter])
        await world.order(Drain(draining=False), epoch=EPOCH + 9)
        await engine.lease(late.digest)
        check_dense(engine, [adapter, late])


async def test_sigterm_lets_leases_end_then_exits_with_0(mortal: World) -> None:
    adapter = mortal.pack(1)
    async with linked_engine(mortal.server, CARD) as engine:
        await engine.lease(adapter.digest)
        os.kill(mortal.server.pid, signal.SIGTERM)
        await mortal.beat_that(lambda beat, _: beat.state == "draining")
        check_dense(engine, [adapter])
        await engine.release(adapter.digest)
        with pytest.raises(StopAsyncIteration):
            await engine.hear()
    assert await asyncio.to_thread(mortal.server.wait_end) == 0


async def test_links_and_leases_outlive_the_broker_and_the_store(tmp_path: Path, s3_server: WeedServer) -> None:
    nats, redis = NatsServer(tmp_path / "nats").start(), ValkeyServer(tmp_path / "redis").start()
    world = World(tmp_path, nats, redis, s3_server, CARD)
    first, second = world.pack(1), world.pack(2)
    world.server.start()
    try:
        async with linked_engine(world.server, CARD) as engine:
            await engine.lease(first.digest)
            nats.kill()
            redis.kill()
            check_dense(engine, [first])
            await engine.lease(second.digest)
            check_dense(engine, [first, second])
            nats.start()
            redis.start()
            await world.beat_that(lambda _, load: load.leases == 2)
            check_dense(engine, [first, second])
    finally:
        world.server.stop()
        nats.stop()
        redis.stop()


async def test_a_cold_start_without_a_broker_still_serves(tmp_path: Path, s3_server: WeedServer) -> None:
    nats, redis = NatsServer(tmp_path / "nats"), ValkeyServer(tmp_path / "redis")
    world = World(tmp_path, nats, redis, s3_server, CARD)
    adapter = world.pack(1)
    world.server.settings["BASE"] = CARD.name
    world.server.start()
    try:
        async with linked_engine(world.server, CARD) as engine:
            await engine.lease(adapter.digest)
            check_dense(engine, [adapter])
    finally:
        world.server.stop()


async def test_sigterm_ends_a_server_that_still_waits_for_its_base_without_a_drain(
    world: World, tmp_path: Path
) -> None:
    shared = {name: world.server.settings[name] for name in ("NATS_URL", "REDIS_URL", "STORE_URL")}
    keys_of_store = {name: world.server.settings[name] for name in ("S3_ACCESS_KEY", "S3_SECRET_KEY")}
    waits = LoraServerProcess(tmp_path, BASE="nobody-serves-this", DRAIN_S=600, **shared, **keys_of_store)
    waits.launch()
    try:
        await eventually(lambda: "waiting for the base" in waits.log.read_text(), "it waits", timeout_s=30)
        os.kill(waits.pid, signal.SIGTERM)
        assert await asyncio.to_thread(waits.wait_end) == 0
    finally:
        waits.stop()


def test_bad_settings_end_with_status_2_and_say_which(tmp_path: Path) -> None:
    server = LoraServerProcess(tmp_path, POOL_BYTES="many", BASE="x")
    with pytest.raises(RuntimeError):
        server.start()
    assert "INFINILORA_POOL_BYTES" in server.log.read_text()
