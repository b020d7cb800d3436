"""The pool end to end over a directory store: right bytes to the right rows, and every way a load can end."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from infinilora.pool.execute import SiteCall, StepWork, TenancyRows, execute
from infinilora.pool.loader import RETRY_AFTER_S
from infinilora.pool.pool import AdapterPool, LeaseState, PoolConfig
from infinilora.pool.tenancy import Limits
from infinilora.protocol import keys
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterFailed, Overloaded, Unavailable
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.weights.packed import packed_ranges, read_header
from support.cards import make_card
from support.pools import DefinedKernels, Packed, Told, WatchedBlobs, pack, rows_of
from support.procs import wait_until

CARD = make_card("llama", num_layers=3)
MOE_CARD = make_card("qwen3_moe", num_layers=2, num_experts=4, intermediate=24)


class House:
    """A pool, the store behind it, and its kernels."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.blobs = WatchedBlobs(DirectoryBlobs(work / "store"))
        self.kernels = DefinedKernels()
        self.deaths: list[BaseException] = []
        self.pools: list[AdapterPool] = []

    def pool(
        self,
        *,
        capacity_bytes: int = 4 << 20,
        num_slots: int = 8,
        moe: bool = False,
        limits: Limits | None = None,
        threads: int = 2,
        fetch_threads: int = 2,
        host_bytes: int = 0,
    ) -> AdapterPool:
        card = MOE_CARD if moe else CARD
        config = PoolConfig(
            base=card.fingerprint,
            num_layers=card.num_layers,
            capacity_bytes=capacity_bytes,
            num_slots=num_slots,
            cache_dir=self.work / "cache",
            cache_bytes=1 << 20,
            host_bytes=host_bytes,
            loader_threads=threads,
            fetch_threads=fetch_threads,
            limits=limits or Limits(),
        )
        pool = AdapterPool(config, self.blobs, self.kernels, on_death=self.deaths.append)
        self.pools.append(pool)
        return pool

    def pack(self, seed: int, *, moe: bool = False, rank: int = 4, dtype: str = "F32") -> Packed:
        return pack(self.work, self.blobs, MOE_CARD if moe else CARD, seed=seed, rank=rank, dtype=dtype)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.blobs.gate.set()
    for pool in house.pools:
        pool.check()
        pool.close()
    assert not house.deaths


def leased(pool: AdapterPool, digest: Digest, holder: str = "engine") -> LeaseState:
    told = Told()
    pool.lease(holder, digest, told)
    return told.resident()


def settled(pool: AdapterPool) -> Callable[[], bool]:
    def is_idle() -> bool:
        try:
            pool.check_idle()
        except AssertionError:
            return False
        return True

    return is_idle


def test_a_mixed_step_gives_each_row_the_delta_of_its_own_adapter(house: House) -> None:
    adapters = [house.pack(seed, rank=rank) for seed, rank in enumerate((4, 8, 16))]
    pool = house.pool()
    states = [leased(pool, a.digest) for a in adapters]
    work = StepWork(1, [TenancyRows(2 * i, 2, s.slot, s.slot_generation) for i, s in enumerate(states)])
    for layer in range(CARD.num_layers):
        for site in (Site.QKV, Site.O, Site.GATE_UP, Site.DOWN):
            geometry = CARD.geometry()[layer, site]
            x = rows_of(6, cols=geometry.in_dim, seed=layer)
            out = torch.full((6, geometry.out_dim), torch.nan)
            execute(pool.kernels, pool.grants("engine"), work, SiteCall(layer, site, 0, x, out))
            for i, adapter in enumerate(adapters):
                rows = slice(2 * i, 2 * i + 2)
                np.testing.assert_allclose(out[rows], adapter.delta(layer, site, x[rows].numpy()), atol=1e-5)
                wrong = adapters[i - 1].delta(layer, site, x[rows].numpy())
                assert np.abs(out[rows].numpy() - wrong).max() > 1e-3


@pytest.mark.parametrize("host_bytes", [0, 1 << 20], ids=["from the disk", "from host memory"])
def test_what_comes_back_after_an_eviction_is_the_same_to_the_bit(house: House, host_bytes: int) -> None:
    adapter, *others = (house.pack(seed) for seed in range(3))
    pool = house.pool(num_slots=1, host_bytes=host_bytes)
    seen = set()
    for number in range(10):
        seen.add(bound_bytes(house, leased(pool, adapter.digest).slot))
        pool.release("engine", adapter.digest)
        other = others[number % 2]
        assert bound_bytes(house, leased(pool, other.digest).slot) not in seen
        pool.release("engine", other.digest)
    assert len(seen) == 1


def bound_bytes(house: House, slot: int) -> bytes:
    """Everything that a slot computes with: scales, factors and vectors of each part of each site, in order."""
    parts = (part for _, slots in sorted(house.kernels.bound.items()) for part in slots.get(slot, ()))
    return b"|".join(
        value.contiguous().view(torch.uint8).numpy().tobytes()
        if isinstance(value, torch.Tensor)
        else repr(value).encode()
        for part in parts
        for value in (getattr(part, name) for name in part.__slots__)
    )


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_a_routed_site_takes_the_chosen_experts_and_sums_by_weight(house: House, dtype: str) -> None:
    adapter = house.pack(1, moe=True, dtype=dtype)
    pool = house.pool(moe=True)
    state = leased(pool, adapter.digest)
    work = StepWork(1, [TenancyRows(0, 5, state.slot, state.slot_generation)])
    ids = torch.tensor([[0, 1], [2, 3], [1, 3], [3, 0], [2, 2]], dtype=torch.int32)
    weights = torch.rand(5, 2)
    act = rows_of(10, cols=24).view(5, 2, 24)
    out = torch.full((5, MOE_CARD.hidden_dim), torch.nan)
    call = SiteCall(0, Site.MOE_DOWN, 0, act, out, ids, weights)
    execute(pool.kernels, pool.grants("engine"), work, call)
    wanted = np.zeros((5, MOE_CARD.hidden_dim))
    for t in range(5):
        for j in range(2):
            delta = adapter.deltas[f"model.layers.0.mlp.experts.{ids[t, j]}.down_proj"]
            wanted[t] += weights[t, j].item() * (delta @ act[t, j].numpy())
    np.testing.assert_allclose(out, wanted, atol=1e-4)


def test_layers_become_ready_one_by_one_and_then_all(house: House) -> None:
    adapter, told = house.pack(1), Told()
    house.pool().lease("engine", adapter.digest, told)
    told.resident()
    counts = [s.layers_ready for s in told.states]
    assert counts == sorted(counts)
    assert counts[-1] == len(told.states[-1].layer_sites) == CARD.num_layers + 1
    assert told.states[0].layer_sites == told.states[-1].layer_sites


def test_a_store_that_is_not_read_ahead_is_asked_for_each_layer_alone(house: House) -> None:
    adapter = house.pack(1)
    house.blobs.most_ahead_bytes = 0
    leased(house.pool(), adapter.digest)
    with adapter.path.open("rb") as file:
        header = read_header(file)
    layers = [packed_ranges(header, layer) for layer in range(CARD.num_layers)]
    wanted = [(ranges[0][1], sum(num_bytes for _, _, num_bytes in ranges)) for ranges in layers]
    assert [(offset, num_bytes) for _, offset, num_bytes in house.blobs.reads if offset] == wanted


def test_many_holders_of_one_digest_cause_one_load(house: House) -> None:
    adapter = house.pack(1)
    pool = house.pool()
    house.blobs.gate.clear()
    everyone = [Told() for _ in range(8)]
    for i, told in enumerate(everyone):
        pool.lease(f"engine-{i}", adapter.digest, told)
    house.blobs.gate.set()
    assert len({(t.resident().slot, t.resident().slot_generation) for t in everyone}) == 1
    starts = [offset for name, offset, _ in house.blobs.reads if name == keys.packed(adapter.digest)]
    assert len(starts) == len(set(starts))


def test_a_load_that_nobody_wants_any_more_ends_and_leaves_nothing(house: House) -> None:
    adapter = house.pack(1)
    pool = house.pool()
    house.blobs.gate.clear()
    pool.lease("engine", adapter.digest, Told())
    assert house.blobs.arrived.acquire(timeout=5)
    pool.release("engine", adapter.digest)
    house.blobs.gate.set()
    wait_until(settled(pool), "the load to end")
    assert pool.resident() == ()
    assert leased(pool, adapter.digest).is_resident


def test_a_load_is_cancelled_between_two_layers_and_its_memory_comes_back(house: House) -> None:
    adapter = house.pack(1)
    pool = house.pool(threads=1, fetch_threads=1)
    told = Told()
    in_layer_1, may_go_on = threading.Event(), threading.Event()

    def hold(slot: int, layer: int) -> None:
        if layer == 1:
            in_layer_1.set()
            may_go_on.wait(10)

    house.kernels.on_bind = hold
    pool.lease("engine", adapter.digest, told)
    assert in_layer_1.wait(10)
    pool.drop("engine")
    assert pool.load().bytes_free < pool.load().bytes_total, "a thread still writes there"
    may_go_on.set()
    wait_until(settled(pool), "the load to stop")
    assert pool.load().bytes_free == pool.load().bytes_total
    assert not any(house.kernels.bound.values())


def test_a_store_that_is_away_for_a_while_only_delays(house: House) -> None:
    adapter = house.pack(1)
    house.blobs.failures_left = 2
    assert leased(house.pool(), adapter.digest).is_resident


def test_a_store_that_stays_away_fails_the_lease_as_unavailable(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinilora.pool.loader.RETRY_AFTER_S", (0.01,) * len(RETRY_AFTER_S))
    adapter, told = house.pack(1), Told()
    house.blobs.failures_left = 1000
    pool = house.pool()
    pool.lease("engine", adapter.digest, told)
    assert isinstance(told.lost(), Unavailable)
    wait_until(settled(pool), "the load to end")


def lost(pool: AdapterPool, digest: Digest) -> Exception:
    """What a lease fails with."""
    told = Told()
    pool.lease("engine", digest, told)
    return told.lost()


def test_a_damaged_adapter_is_not_asked_for_again_at_once_unless_it_was_deleted_since(house: House) -> None:
    adapter = house.pack(1)
    stored = house.work / "store" / keys.packed(adapter.digest)
    good = stored.read_bytes()
    corrupt(stored, -200)
    pool = house.pool()
    assert isinstance(lost(pool, adapter.digest), AdapterFailed)
    reads = len(house.blobs.reads)
    stored.write_bytes(good)
    assert isinstance(lost(pool, adapter.digest), AdapterFailed)
    assert len(house.blobs.reads) == reads
    pool.forget(adapter.digest)
    assert leased(pool, adapter.digest).is_resident


def test_what_is_registered_anew_is_served_though_it_was_missing_a_moment_ago(house: House) -> None:
    """A deleted adapter's failure lingered: whoever put the same content back, under any name, was told of it."""
    adapter = house.pack(1)
    stored = house.work / "store" / keys.packed(adapter.digest)
    good = stored.read_bytes()
    stored.unlink()
    pool = house.pool(num_slots=2)
    assert isinstance(lost(pool, adapter.digest), AdapterFailed)
    reads = len(house.blobs.reads)
    stored.write_bytes(good)
    assert isinstance(lost(pool, adapter.digest), AdapterFailed)
    assert len(house.blobs.reads) == reads, "it was asked for again at once"
    pool.registered(adapter.digest)
    assert leased(pool, adapter.digest).is_resident


def test_all_who_wait_are_told_of_one_failure_and_the_next_to_ask_finds_the_store_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinilora.pool.loader.RETRY_AFTER_S", ())
    adapter = house.pack(1)
    pool = house.pool()
    house.blobs.failures_left = 1
    house.blobs.gate.clear()
    everyone = [Told() for _ in range(20)]
    for i, told in enumerate(everyone):
        pool.lease(f"engine-{i}", adapter.digest, told)
    pool.drop("engine-0")
    house.blobs.gate.set()
    errors = {id(told.lost()) for told in everyone[1:]}
    assert len(errors) == 1
    assert not everyone[0].states
    assert len(house.blobs.reads) == 1

    def is_had() -> bool:
        told = Told()
        pool.lease("engine", adapter.digest, told)
        return told.wait(lambda s: s.is_resident or s.error is not None).error is None

    wait_until(is_had, "the store to be asked again")


def test_fetches_that_hang_do_not_hold_up_what_is_in_the_cache(house: House) -> None:
    cached, hung = house.pack(1), [house.pack(2), house.pack(3)]
    first = house.pool()
    leased(first, cached.digest)
    wait_until((house.work / "cache" / f"{cached.digest[7:]}.safetensors").exists, "the cache file")
    pool = house.pool(threads=1, fetch_threads=2)
    house.blobs.gate.clear()
    told = [Told(), Told()]
    for adapter, ear in zip(hung, told, strict=True):
        pool.lease("engine", adapter.digest, ear)
    for _ in hung:
        assert house.blobs.arrived.acquire(timeout=5)
    assert leased(pool, cached.digest).is_resident
    assert not any(ear.states for ear in told)
    house.blobs.gate.set()
    for ear in told:
        assert ear.resident().is_resident


@pytest.mark.parametrize("is_leased", [False, True])
def test_what_is_forgotten_leaves_slot_host_and_disk_once_nobody_leases_it(house: House, is_leased: bool) -> None:
    adapter, other = house.pack(1), house.pack(2)
    pool = house.pool(host_bytes=1 << 20)
    leased(pool, other.digest)
    wait_until((house.work / "cache" / f"{other.digest[7:]}.safetensors").exists, "the other's file")
    rest = pool.tier_bytes(), pool.load().bytes_free
    leased(pool, adapter.digest)
    wait_until((house.work / "cache" / f"{adapter.digest[7:]}.safetensors").exists, "the cache file")
    assert all(now > before for now, before in zip(pool.tier_bytes().values(), rest[0].values(), strict=True))
    if is_leased:
        pool.forget(adapter.digest)
        assert adapter.digest in pool.resident()
        assert leased(pool, adapter.digest, "late").is_resident, "what runs on it is not cut short"
        pool.release("late", adapter.digest)
        pool.release("engine", adapter.digest)
    else:
        pool.release("engine", adapter.digest)
        pool.forget(adapter.digest)
    wait_until(lambda: (pool.tier_bytes(), pool.load().bytes_free) == rest, "every tier to be empty of it")
    assert pool.resident() == (other.digest,)
    pool.forget(adapter.digest)
    house.blobs.reads.clear()
    assert leased(pool, adapter.digest).is_resident
    assert house.blobs.reads


def test_a_pin_takes_back_what_was_to_be_forgotten(house: House) -> None:
    adapter = house.pack(1)
    pool = house.pool()
    leased(pool, adapter.digest)
    pool.forget(adapter.digest)
    pool.pin(adapter.digest, pinned=True)
    pool.release("engine", adapter.digest)
    assert pool.resident() == (adapter.digest,)


def test_a_load_from_the_host_tier_is_the_same_and_asks_neither_disk_nor_store(house: House) -> None:
    adapter, other = house.pack(1), house.pack(2)
    pool = house.pool(num_slots=1, host_bytes=1 << 20)
    leased(pool, adapter.digest)
    pool.release("engine", adapter.digest)
    leased(pool, other.digest)
    pool.release("engine", other.digest)
    wait_until(lambda: pool._loader.num_loads == 0, "both to be kept, which comes after they are resident")
    shutil.rmtree(house.work / "cache")
    house.blobs.failures_left = 1000
    state = leased(pool, adapter.digest)
    x = rows_of(3, cols=CARD.hidden_dim)
    out = torch.empty(3, CARD.geometry()[2, Site.GATE_UP].out_dim)
    work = StepWork(1, [TenancyRows(0, 3, state.slot, state.slot_generation)])
    execute(pool.kernels, pool.grants("engine"), work, SiteCall(2, Site.GATE_UP, 0, x, out))
    np.testing.assert_allclose(out, adapter.delta(2, Site.GATE_UP, x.numpy()), atol=1e-5)


def test_when_pins_hold_every_slot_a_lease_is_refused_at_once_and_says_why(house: House) -> None:
    pinned, other = house.pack(1), house.pack(2)
    pool = house.pool(num_slots=1)
    pool.pin(pinned.digest, pinned=True)
    wait_until(lambda: pool.resident() == (pinned.digest,), "the pin to be followed")
    told = Told()
    pool.lease("engine", other.digest, told)
    error = told.lost()
    assert isinstance(error, Overloaded)
    assert "all 1 of this pool hold pinned adapters" in str(error)
    pool.pin(pinned.digest, pinned=False)
    assert leased(pool, other.digest).is_resident


def corrupt(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_corrupt_store_object_fails_every_holder_naming_the_block(house: House) -> None:
    adapter = house.pack(1)
    corrupt(house.work / "store" / keys.packed(adapter.digest), -200)
    pool = house.pool()
    everyone = [Told(), Told()]
    for i, told in enumerate(everyone):
        pool.lease(f"engine-{i}", adapter.digest, told)
    for told in everyone:
        assert "block 0" in str(told.lost())
    wait_until(settled(pool), "the load to end")
    assert pool.load().bytes_free == pool.load().bytes_total


def test_another_adapters_file_under_this_name_is_refused(house: House) -> None:
    one, other = house.pack(1), house.pack(2)
    house.blobs.put_file(keys.packed(one.digest), other.path)
    told = Told()
    house.pool().lease("engine", one.digest, told)
    assert other.digest in str(told.lost())


def test_an_adapter_of_another_base_is_refused(house: House) -> None:
    told = Told()
    house.pool().lease("engine", house.pack(1, moe=True).digest, told)
    assert "serves" in str(told.lost())


def test_a_second_load_comes_from_the_disk_cache(house: House) -> None:
    adapter = house.pack(1)
    first = house.pool()
    leased(first, adapter.digest)
    wait_until((house.work / "cache" / f"{adapter.digest[7:]}.safetensors").exists, "the cache file")
    first.close()
    house.pools.clear()
    house.blobs.failures_left = 1000
    assert leased(house.pool(), adapter.digest).is_resident


@pytest.mark.parametrize("offset", [-200, 20])
def test_a_corrupt_cache_file_is_dropped_and_fetched_again(house: House, offset: int) -> None:
    adapter = house.pack(1)
    first = house.pool()
    leased(first, adapter.digest)
    file = house.work / "cache" / f"{adapter.digest[7:]}.safetensors"
    wait_until(file.exists, "the cache file")
    first.close()
    house.pools.clear()
    corrupt(file, offset)
    pool = house.pool()
    state = leased(pool, adapter.digest)
    x = rows_of(3, cols=CARD.hidden_dim)
    geometry = CARD.geometry()[2, Site.GATE_UP]
    out = torch.empty(3, geometry.out_dim)
    work = StepWork(1, [TenancyRows(0, 3, state.slot, state.slot_generation)])
    execute(pool.kernels, pool.grants("engine"), work, SiteCall(2, Site.GATE_UP, 0, x, out))
    np.testing.assert_allclose(out, adapter.delta(2, Site.GATE_UP, x.numpy()), atol=1e-5)


def test_a_slot_given_to_another_adapter_is_closed_to_the_old_plan(house: House) -> None:
    one, other = house.pack(1), house.pack(2)
    pool = house.pool(num_slots=1)
    old = leased(pool, one.digest)
    pool.release("engine", one.digest)
    new = leased(pool, other.digest)
    assert (new.slot, new.slot_generation) == (old.slot, old.slot_generation + 1)
    call = SiteCall(0, Site.O, 0, rows_of(1, cols=32), torch.empty(1, 32))
    stale = StepWork(1, [TenancyRows(0, 1, old.slot, old.slot_generation)])
    with pytest.raises(AdapterFailed, match="slot_generation"):
        execute(pool.kernels, pool.grants("engine"), stale, call)


def test_a_pool_too_small_for_all_serves_them_one_after_another(house: House) -> None:
    adapters = [house.pack(seed) for seed in range(4)]
    cost = 3 * 16384
    pool = house.pool(capacity_bytes=cost, limits=Limits(age_after_s=0.1, max_wait_s=30.0))
    for _ in range(2):
        for adapter in adapters:
            assert leased(pool, adapter.digest).is_resident
            pool.release("engine", adapter.digest)
            pool.check()


def test_one_that_waits_for_a_leased_slot_gets_it_on_release_and_not_before(house: House) -> None:
    one, other = house.pack(1), house.pack(2)
    pool = house.pool(num_slots=1)
    leased(pool, one.digest, "e1")
    told = Told()
    pool.lease("e2", other.digest, told)
    name = keys.packed(other.digest)
    wait_until(lambda: any(read[0] == name for read in house.blobs.reads), "the other's manifest to be read")
    assert not told.states
    pool.drop("e1")
    assert told.resident().is_resident


def test_one_that_waits_in_vain_is_refused_in_time(house: House) -> None:
    one, other = house.pack(1), house.pack(2)
    pool = house.pool(num_slots=1, limits=Limits(age_after_s=0.02, max_wait_s=0.05))
    leased(pool, one.digest, "e1")
    told = Told()
    pool.lease("e2", other.digest, told)
    assert isinstance(told.lost(), Overloaded)


def test_a_hint_stages_without_a_holder_and_an_evict_hint_undoes_it(house: House) -> None:
    adapter = house.pack(1)
    pool = house.pool()
    pool.stage(adapter.digest)
    wait_until(lambda: pool.resident() == (adapter.digest,), "the hint to be followed")
    pool.evict(adapter.digest)
    assert pool.resident() == ()
    # The thread that brought the last layer may still be putting the file into the cache.
    wait_until(lambda: pool.load().bytes_free == pool.load().bytes_total, "its memory to come back")


def test_a_draining_pool_refuses_new_leases_at_once(house: House) -> None:
    adapter, told = house.pack(1), Told()
    pool = house.pool()
    pool.drain(draining=True)
    pool.lease("engine", adapter.digest, told)
    assert isinstance(told.lost(), Unavailable)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_loader_thread_is_reported(house: House) -> None:
    adapter = house.pack(1)
    pool = house.pool()

    def broken(slot: int, layer: int) -> None:
        raise ZeroDivisionError

    house.kernels.on_bind = broken
    pool.lease("engine", adapter.digest, Told())
    wait_until(lambda: bool(house.deaths), "the death to be heard")
    assert isinstance(house.deaths.pop(), ZeroDivisionError)


def test_a_pool_tells_what_it_has_what_is_on_its_way_and_what_failed(house: House) -> None:
    good, bad = house.pack(1), house.pack(2)
    path = house.work / "store" / keys.packed(bad.digest)
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    pool = house.pool()
    house.blobs.gate.clear()
    told = Told()
    pool.lease("engine", good.digest, told)
    assert (pool.load().loading, pool.load().resident) == ((good.digest,), ())
    house.blobs.gate.set()
    assert told.resident().is_resident
    pool.lease("engine", bad.digest, failed := Told())
    assert isinstance(failed.lost(), AdapterFailed)
    load = pool.load()
    assert (load.loading, load.resident) == ((), (good.digest,))
    assert [(failure.digest, failure.code) for failure in load.failed] == [(bad.digest, "adapter_failed")]
    pool.registered(bad.digest)
    assert pool.load().failed == ()


def test_an_adapter_that_no_pool_of_this_size_can_hold_has_failed_for_good(house: House) -> None:
    adapter = house.pack(1, rank=64)
    pool = house.pool(capacity_bytes=4096)
    for _ in range(2):
        pool.lease("engine", adapter.digest, told := Told())
        assert "raise pool_bytes" in str(told.lost())
    assert [failure.digest for failure in pool.load().failed] == [adapter.digest]


def test_a_load_without_memory_fails_for_a_moment_and_the_pool_lives(house: House) -> None:
    adapter = house.pack(1)
    house.kernels = kernels = HungryKernels()
    pool = house.pool()
    pool.lease("engine", adapter.digest, refused := Told())
    assert isinstance(refused.lost(), Overloaded)
    kernels.is_hungry = False
    wait_until(lambda: not pool._failures.known(adapter.digest, time.monotonic()), "the pause to be over")
    assert leased(pool, adapter.digest).is_resident


class HungryKernels(DefinedKernels):
    """Have no memory for what a site is described by."""

    is_hungry = True

    @override
    def bind(self, *arguments: Any, **named: Any) -> None:
        if self.is_hungry:
            np.empty(1 << 62, np.uint8)
        super().bind(*arguments, **named)
