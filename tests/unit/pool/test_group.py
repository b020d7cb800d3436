"""The pools of a group's shards together hold each adapter once, each its own part, and give it back together."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infinilora.pool.execute import SiteCall, StepWork, TenancyRows, execute
from infinilora.pool.pool import LeaseState
from infinilora.pool.share import Share
from infinilora.protocol import keys
from infinilora.protocol.adapter import MOE_SITES, Site, SiteGeometry
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.protocol.shards import Shape
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.weights.packed import read_header
from support.cards import make_card
from support.pools import Packed, Told, WatchedBlobs, pack, rows_of
from support.procs import wait_until
from support.scaled import pack_scaled
from support.sharded_pools import GroupOfPools

CARD = make_card("qwen2_moe", num_layers=3, num_experts=5, intermediate=24, shared_intermediate=40)
DENSE = make_card("llama", num_layers=4, outer=True)
OUTER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
SHAPES = [Shape(1, 2), Shape(2, 1), Shape(2, 2), Shape(3, 2)]


class Adapters:
    """Packed once for all tests of this file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = DirectoryBlobs(root / "store")
        self._made: dict[tuple[int, bool, int], Packed] = {}

    def pack(self, seed: int, *, dense: bool, rank: int) -> Packed:
        if (seed, dense, rank) not in self._made:
            card, targets = (DENSE, OUTER) if dense else (CARD, None)
            work = self.root / f"{len(self._made)}"
            work.mkdir()
            self._made[seed, dense, rank] = pack(work, self.blobs, card, seed=seed, rank=rank, targets=targets)
        return self._made[seed, dense, rank]


class House:
    """The groups of one test, with caches of their own."""

    def __init__(self, work: Path, adapters: Adapters) -> None:
        self.work = work
        self.adapters = adapters
        self.blobs = WatchedBlobs(adapters.blobs)
        self.groups: list[GroupOfPools] = []

    def group(self, shape: Shape, *, dense: bool = False, **more: Any) -> GroupOfPools:
        self.groups.append(GroupOfPools(DENSE if dense else CARD, shape, self.blobs, self.work, **more))
        return self.groups[-1]

    def pack(self, seed: int, *, dense: bool = False, rank: int = 4) -> Packed:
        return self.adapters.pack(seed, dense=dense, rank=rank)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def house(tmp_path: Path, adapters: Adapters) -> Iterator[House]:
    house = House(tmp_path, adapters)
    yield house
    house.blobs.gate.set()
    for group in house.groups:
        group.close()


def leased(group: GroupOfPools, digest: Digest, holder: str = "engine") -> LeaseState:
    told = Told()
    group.head.lease(holder, digest, told)
    return told.resident()


def idle(group: GroupOfPools) -> Callable[[], bool]:
    def is_idle() -> bool:
        try:
            group.check_idle()
        except AssertionError:
            return False
        return True

    return is_idle


def plan(*states: LeaseState) -> StepWork:
    """Three rows for each lease."""
    return StepWork(1, [TenancyRows(3 * i, 3, s.slot, s.slot_generation) for i, s in enumerate(states)])


def dense_delta(group: GroupOfPools, shard: int, work: StepWork, geometry: SiteGeometry, rows: int) -> np.ndarray:
    x = rows_of(rows, cols=geometry.in_dim, seed=geometry.layer)
    ids = None
    if geometry.site is Site.EMBED:
        ids = (torch.arange(rows, dtype=torch.int32) * 7 % geometry.in_dim)[:, None]
        x = x[:, :0]
    out = torch.empty(rows, geometry.out_dim)
    return group.run(shard, work, SiteCall(geometry.layer, geometry.site, 0, x, out, ids)).numpy()


def wanted_delta(adapter: Packed, geometry: SiteGeometry, rows: int) -> np.ndarray:
    x = rows_of(rows, cols=geometry.in_dim, seed=geometry.layer).numpy()
    if geometry.site is Site.EMBED:
        x = np.eye(geometry.in_dim, dtype=np.float32)[np.arange(rows) * 7 % geometry.in_dim]
    return adapter.delta(geometry.layer, geometry.site, x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "moe"])
def test_the_owner_of_each_dense_site_computes_it_and_nobody_else_has_it(
    house: House, shape: Shape, dense: bool
) -> None:
    adapters = [house.pack(seed, dense=dense, rank=4 + seed) for seed in range(2)]
    group = house.group(shape, dense=dense)
    work = plan(*(leased(group, adapter.digest) for adapter in adapters))
    sites = [site for site in group.card.sites if not site.num_experts]
    assert sites
    for geometry in sites:
        owner = group.sharding.dense_shard(geometry.layer, geometry.site)
        for shard in range(shape.num_shards):
            found = dense_delta(group, shard, work, geometry, 6)
            if shard != owner:
                assert not found.any()
                continue
            for i, adapter in enumerate(adapters):
                rows = slice(3 * i, 3 * i + 3)
                wanted = wanted_delta(adapter, geometry, 6)[rows]
                np.testing.assert_allclose(found[rows], wanted, atol=2e-5)
                other = wanted_delta(adapters[1 - i], geometry, 6)[rows]
                assert np.abs(found[rows] - other).max() > 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_column_computes_its_own_experts_by_their_number_in_it(house: House, shape: Shape) -> None:
    adapter = house.pack(1)
    group = house.group(shape)
    work = plan(leased(group, adapter.digest))
    for geometry in (g for g in CARD.sites if g.site is Site.MOE_GATE_UP):
        x = rows_of(3, cols=geometry.in_dim, seed=geometry.layer)
        held = list[int]()
        for shard in range(shape.num_shards):
            experts = group.sharding.experts(shard, geometry.layer, geometry.num_experts)
            held += experts
            ids = torch.tensor([[n, -1] for n in (0, len(experts) - 1, len(experts))], dtype=torch.int32)
            out = torch.empty(3, 2, geometry.out_dim)
            call = SiteCall(geometry.layer, geometry.site, 0, x, out, ids)
            found = group.run(shard, work, call).numpy()
            assert not found[:, 1].any(), "no expert adds nothing"
            assert not found[2].any(), "an expert of the next column adds nothing here"
            for row, expert in enumerate((experts[0], experts[-1]) if experts else ()):
                rows = [
                    adapter.deltas[part.module.replace("{expert}", str(expert))] @ x[row].double().numpy()
                    for part in geometry.parts
                ]
                np.testing.assert_allclose(found[row, 0], np.concatenate(rows), atol=2e-5)
        assert held == list(range(geometry.num_experts))


def test_an_adapter_is_granted_once_every_shard_of_a_stage_has_the_layer(house: House) -> None:
    adapter = house.pack(1)
    group = house.group(Shape(2, 2))
    group.up[3].gate.clear()  # what the last shard says is on its way
    told = Told()
    group.head.lease("engine", adapter.digest, told)
    wait_until(lambda: group.followers[2].load().resident == (adapter.digest,), "another shard has it")
    assert not any(state.is_resident for state in told.states)
    group.up[3].gate.set()
    assert told.resident().layers_ready == CARD.num_layers + 1


def test_a_slot_is_used_again_only_when_every_shard_has_given_it_up(house: House) -> None:
    first, second = house.pack(1), house.pack(2)
    group = house.group(Shape(1, 2), num_slots=1)
    leased(group, first.digest)
    group.head.release("engine", first.digest)
    group.up[1].gate.clear()
    told = Told()
    group.head.lease("engine", second.digest, told)
    wait_until(lambda: not group.followers[1]._tenancies, "the follower has given it up")
    assert not told.states, "the slot is not free yet"
    group.up[1].gate.set()
    state = told.resident()
    for geometry in (g for g in CARD.sites if g.site is Site.QKV):
        owner = group.sharding.dense_shard(geometry.layer, geometry.site)
        found = dense_delta(group, owner, plan(state), geometry, 3)
        np.testing.assert_allclose(found, wanted_delta(second, geometry, 3), atol=2e-5)


def test_a_shard_computes_with_a_tenancy_no_more_once_it_was_emptied(house: House) -> None:
    adapter = house.pack(1)
    group = house.group(Shape(1, 2))
    state = leased(group, adapter.digest)
    group.head.evict(adapter.digest)
    group.head.release("engine", adapter.digest)
    wait_until(idle(group), "the group is idle")
    geometry = CARD.geometry()[2, Site.QKV]
    with pytest.raises(AdapterFailed, match="no lease"):
        dense_delta(group, group.sharding.dense_shard(2, Site.QKV), plan(state), geometry, 3)
    assert not group.followers[1]._tenancies


def test_a_part_that_cannot_be_had_fails_the_adapter_everywhere(house: House) -> None:
    good, bad = house.pack(1), house.pack(99)
    with (house.adapters.root / "store" / keys.packed(bad.digest)).open("r+b") as file:
        file.seek(-200, 2)  # the last layer: the head of this group has none of it
        file.write(b"\xff" * 100)
    group = house.group(Shape(1, 3))
    told = Told()
    group.head.lease("engine", bad.digest, told)
    with pytest.raises(AdapterFailed, match="sha256"):
        told.resident()
    wait_until(idle(group), "the group is idle")
    leased(group, good.digest)
    assert group.head.load().resident == (good.digest,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_head_tells_the_column_scales_of_every_shard(house: House, shape: Shape) -> None:
    adapter = pack_scaled(house.work, house.blobs, CARD, seed=5)
    state = leased(house.group(shape), adapter.digest)
    told = {(scale.layer, scale.site): scale.factors.numpy() for scale in state.scales}
    wanted = {at: factors for at, factors in adapter.factors.items() if at[1] not in MOE_SITES}
    assert told.keys() == wanted.keys()
    for at, factors in wanted.items():
        np.testing.assert_array_equal(told[at], factors)
    assert [scale.layer for scale in state.scales] == sorted(scale.layer for scale in state.scales)


def test_a_shard_reads_only_its_own_ranges_and_all_of_them_once(house: House) -> None:
    adapter = house.pack(1, rank=64)
    group = house.group(Shape(3, 1))
    leased(group, adapter.digest)
    header_bytes = 1 << 20  # the first read of each shard is of the header, and ahead of it
    asked = sum(num_bytes for _, _, num_bytes in house.blobs.reads if num_bytes != header_bytes)
    data = sum(sum(p.num_bytes for p in _pieces(group, shard, adapter)) for shard in range(3))
    size = adapter.path.stat().st_size
    assert size * 0.9 < data < size
    assert asked <= data


def _pieces(group: GroupOfPools, shard: int, adapter: Packed) -> list[Any]:

    with adapter.path.open("rb") as file:
        cut = Share.of_group(group.sharding, shard).cut(read_header(file))
    return [piece for layer in range(CARD.num_layers + 1) for piece in cut.pieces(layer)]


@pytest.mark.parametrize("host_bytes", [0, 1 << 20], ids=["from the disk", "from host memory"])
def test_what_comes_back_from_a_cache_that_shards_share_is_the_same(house: House, host_bytes: int) -> None:
    adapter = house.pack(1)
    group = house.group(Shape(2, 2), host_bytes=host_bytes)
    reads: list[tuple[str, int, int]] = []
    for _ in range(2):
        state = leased(group, adapter.digest)
        for geometry in (g for g in CARD.sites if not g.num_experts):
            owner = group.sharding.dense_shard(geometry.layer, geometry.site)
            found = dense_delta(group, owner, plan(state), geometry, 3)
            np.testing.assert_allclose(found, wanted_delta(adapter, geometry, 3), atol=2e-5)
        group.head.evict(adapter.digest)
        group.head.release("engine", adapter.digest)
        wait_until(idle(group), "the group is idle")
        reads, house.blobs.reads = house.blobs.reads, []
    assert not reads, "the second time, nothing was asked of the store"
    group.head.forget(adapter.digest)
    wait_until(lambda: not any((house.work / "cache").glob("*.safetensors")), "no shard has a copy")


def test_memory_is_accounted_for_through_any_churn(house: House) -> None:
    adapters = [house.pack(seed, rank=2 + 7 * seed) for seed in range(6)]
    group = house.group(Shape(2, 2), capacity_bytes=300_000, num_slots=3)
    dice = random.Random(4)
    for turn in range(60):
        adapter = dice.choice(adapters)
        told, holder = Told(), f"engine-{turn}"
        group.head.lease(holder, adapter.digest, told)
        if dice.random() < 0.3:
            group.head.release(holder, adapter.digest)
            continue
        state = told.resident()
        geometry = CARD.geometry()[dice.randrange(3), Site.QKV]
        owner = group.sharding.dense_shard(geometry.layer, geometry.site)
        if owner == 0:
            group.head.grants(holder)
        work = plan(state)
        x = rows_of(3, cols=geometry.in_dim, seed=geometry.layer)
        out = torch.empty(3, geometry.out_dim)
        call = SiteCall(geometry.layer, geometry.site, 0, x, out)

        execute(group.pool(owner).kernels, group.pool(owner).grants(holder), work, call)
        np.testing.assert_allclose(out, wanted_delta(adapter, geometry, 3), atol=2e-5)
        group.head.drop(holder)
        if owner:
            group.followers[owner].drop(holder)
    for adapter in adapters:
        group.head.evict(adapter.digest)
    wait_until(idle(group), "the group is idle")
    arenas = group.others._arenas.values()
    wait_until(lambda: all(a.free_bytes == a.capacity_bytes for a in arenas), "every follower's memory is back")
