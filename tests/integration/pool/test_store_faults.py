"""A pool over a real S3 server, with a proxy between them: how often it asks, and what faults of the store cost."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch

from infinilora.pool.execute import SiteCall, StepWork, TenancyRows, execute
from infinilora.pool.pool import AdapterPool, LeaseState, PoolConfig
from infinilora.protocol import keys
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterFailed, StoreRefused, Unavailable
from infinilora.runtime.blobs import S3Blobs
from infinilora.runtime.credentials import Credentials
from infinilora.runtime.s3_blobs import S3Place
from support.cards import make_card
from support.pools import DefinedKernels, Packed, Told, pack, rows_of
from support.procs import WeedServer, wait_until
from support.s3_proxy import Fault, S3Proxy

pytestmark = pytest.mark.integration

CARD = make_card("llama", num_layers=3)


class House:
    """Pools over one bucket behind a proxy."""

    def __init__(self, work: Path, proxy: S3Proxy, server: WeedServer) -> None:
        self.work = work
        self.proxy = proxy
        keys = Credentials(access_key=server.access_key, secret_key=server.secret_key)
        self.blobs = S3Blobs(S3Place(bucket=f"pool-{uuid4().hex[:8]}", endpoint=proxy.endpoint), keys)
        self.deaths: list[BaseException] = []
        self.pools: list[AdapterPool] = []

    def pack(self, seed: int) -> Packed:
        packed = pack(self.work, self.blobs, CARD, seed=seed)
        self.proxy.seen.clear()
        return packed

    def pool(self, name: str = "one") -> AdapterPool:
        config = PoolConfig(
            base=CARD.fingerprint,
            num_layers=CARD.num_layers,
            capacity_bytes=4 << 20,
            num_slots=8,
            cache_dir=self.work / f"cache-{name}",
            cache_bytes=1 << 20,
        )
        pool = AdapterPool(config, self.blobs, DefinedKernels(), on_death=self.deaths.append)
        self.pools.append(pool)
        return pool

    def gets(self, adapter: Packed) -> list[str]:
        """The ranges that were asked of the adapter's object."""
        return [seen.headers["range"] for seen in self.proxy.asked("GET", keys.packed(adapter.digest))]


@pytest.fixture
def house(tmp_path: Path, s3_server: WeedServer) -> Iterator[House]:
    with S3Proxy(s3_server.port) as proxy:
        house = House(tmp_path, proxy, s3_server)
        yield house
        for pool in house.pools:
            pool.check()
            pool.close()
        assert not house.deaths


def leased(pool: AdapterPool, adapter: Packed, holder: str = "engine") -> LeaseState:
    told = Told()
    pool.lease(holder, adapter.digest, told)
    return told.resident()


def is_right(pool: AdapterPool, adapter: Packed, state: LeaseState, holder: str = "engine") -> None:
    x = rows_of(3, cols=CARD.hidden_dim)
    out = torch.empty(3, CARD.geometry()[2, Site.GATE_UP].out_dim)
    work = StepWork(1, [TenancyRows(0, 3, state.slot, state.slot_generation)])
    execute(pool.kernels, pool.grants(holder), work, SiteCall(2, Site.GATE_UP, 0, x, out))
    np.testing.assert_allclose(out, adapter.delta(2, Site.GATE_UP, x.numpy()), atol=1e-5)


def test_two_hundred_first_requests_fetch_once_on_each_of_two_servers(house: House) -> None:
    adapter = house.pack(1)
    pools = [house.pool("one"), house.pool("two")]
    everyone = []
    with house.proxy.held(keys.packed(adapter.digest)):
        for i in range(200):
            everyone.append((pools[i % 2], f"engine-{i}", told := Told()))
            pools[i % 2].lease(f"engine-{i}", adapter.digest, told)
        pools[0].drop("engine-0")  # the first to ask leaves; the others are not to feel it
    for pool, holder, told in everyone[1:]:
        is_right(pool, adapter, told.resident(), holder)
    ranges = house.gets(adapter)
    assert sorted(ranges) == sorted(2 * list(dict.fromkeys(ranges))), "a range is fetched once by each server"


def test_nothing_is_read_again_for_what_is_resident_or_in_the_cache(house: House) -> None:
    adapter = house.pack(1)
    pool = house.pool()
    leased(pool, adapter)
    wait_until(lambda: pool.tier_bytes()["disk"] > 0 and not list(house.work.glob("cache-one/*.part")), "the file")
    house.proxy.seen.clear()
    for i in range(100):
        is_right(pool, adapter, leased(pool, adapter, f"engine-{i}"), f"engine-{i}")
        pool.drop(f"engine-{i}")
    pool.drop("engine")
    pool.evict(adapter.digest)
    is_right(pool, adapter, leased(pool, adapter))
    assert house.proxy.seen == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut_after=1000),
        Fault(status=500),
        Fault(status=503),
        Fault(headers={"Content-Length": "100"}),
        Fault(headers={"Content-Range": "bytes 7-8/9"}),
    ],
)
def test_a_store_that_stumbles_only_delays_and_never_corrupts(house: House, fault: Fault) -> None:
    adapter = house.pack(1)
    house.proxy.fault(fault, times=4)
    pool = house.pool()
    is_right(pool, adapter, leased(pool, adapter))


def test_a_store_that_refuses_fails_the_lease_as_refused_and_is_asked_again_once_it_does_not(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinilora.pool.loader.RETRY_AFTER_S", ())
    adapter, pool = house.pack(1), house.pool()
    house.proxy.fault(Fault(status=403, body="<Error><Code>AccessDenied</Code></Error>"))
    told = Told()
    pool.lease("engine", adapter.digest, told)
    error = told.lost()
    assert isinstance(error, StoreRefused)
    assert "127.0.0.1" not in str(error)

    def is_had() -> bool:
        again = Told()
        pool.lease("engine", adapter.digest, again)
        return again.wait(lambda s: s.is_resident or s.error is not None).error is None

    wait_until(is_had, "the store to be asked again")


def test_an_object_that_is_gone_fails_by_its_digest_and_is_left_alone(house: House) -> None:
    adapter, pool = house.pack(1), house.pool()
    house.blobs.delete(keys.packed(adapter.digest))
    house.proxy.seen.clear()
    for i in range(100):
        told = Told()
        pool.lease(f"engine-{i}", adapter.digest, told)
        error = told.lost()
        assert isinstance(error, AdapterFailed)
        assert not isinstance(error, Unavailable)
        assert adapter.digest.removeprefix("sha256:") in str(error)
    assert len(house.gets(adapter)) == 1


def test_a_cache_that_is_emptied_under_a_running_server_is_filled_again(house: House) -> None:
    adapter, other = house.pack(1), house.pack(2)
    pool = house.pool()
    leased(pool, adapter)
    cache = house.work / "cache-one"
    wait_until(lambda: bool(list(cache.glob("*.safetensors"))), "the cache file")
    for file in cache.iterdir():
        file.unlink()
    cache.rmdir()
    pool.drop("engine")
    pool.evict(adapter.digest)
    is_right(pool, adapter, leased(pool, adapter))
    is_right(pool, other, leased(pool, other))
