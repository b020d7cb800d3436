"""The coupled mode over a real pool: right deltas to the right rows, nothing for the others."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from infinilora.engine.lora.interface import AdapterRows, LeaseStatus, LoraBackend, Routing, StepLost
from infinilora.engine.lora.local import LocalLora
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.pool.pool import AdapterPool, LeaseState, PoolConfig
from infinilora.pool.scales import SiteScale
from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from support.cards import make_card
from support.pools import Packed, pack, rows_of

CARD = make_card("llama", num_layers=2)
MOE_CARD = make_card("qwen3_moe", num_layers=2, num_experts=4, intermediate=24)
MISSING = Digest("sha256:" + "0" * 64)


class Coupled:
    """A local backend over a pool of its own, with a bell that can be waited for."""

    def __init__(self, work: Path, card: BaseCard) -> None:
        self.work, self.card = work, card
        self.blobs = DirectoryBlobs(work / "store")
        config = PoolConfig(
            base=card.fingerprint,
            num_layers=card.num_layers,
            capacity_bytes=4 << 20,
            num_slots=4,
            cache_dir=work / "cache",
            cache_bytes=1 << 20,
        )
        kernels = SlotKernels(num_slots=4, num_layers=card.num_layers + 1)
        self.deaths: list[BaseException] = []
        self.pool = AdapterPool(config, self.blobs, kernels, on_death=self.deaths.append)
        self._rung = threading.Condition()
        self.lora = LocalLora(self.pool, self._ring)

    def _ring(self) -> None:
        with self._rung:
            self._rung.notify_all()

    def pack(self, seed: int, **options: object) -> Packed:
        return pack(self.work, self.blobs, self.card, seed=seed, **options)  # type: ignore[arg-type]  # as given

    def until(self, is_true: Callable[[], bool]) -> None:
        with self._rung:
            assert self._rung.wait_for(is_true, 10), "the pool never told it"

    def resident(self, digest: Digest) -> None:
        self.lora.want(digest)
        self.until(lambda: self.lora.view(digest).status is LeaseStatus.RESIDENT)

    def rows(self, *segments: tuple[int, Packed]) -> list[AdapterRows]:
        at, rows = 0, []
        for count, packed in segments:
            lease = self.lora.view(packed.digest).lease
            assert lease is not None
            rows.append(AdapterRows(at, count, lease))
            at += count
        return rows


@pytest.fixture
def coupled(tmp_path: Path) -> Iterator[Callable[[BaseCard], Coupled]]:
    made: list[Coupled] = []

    def make(card: BaseCard) -> Coupled:
        made.append(Coupled(tmp_path, card))
        return made[-1]

    yield make
    for each in made:
        each.lora.close()
        each.pool.close()
        assert not each.deaths


def _site(lora: LoraBackend, rows: list[AdapterRows], layer: int, site: Site, x: torch.Tensor, y: torch.Tensor) -> None:
    plan = lora.begin(rows)
    assert plan is not None
    lora.add(lora.submit(plan, layer, site, x), y)
    lora.end(plan)


def _x(*counts: int, cols: int) -> NDArray[np.float32]:
    return rows_of(*counts, cols=cols).numpy()


def test_each_row_gets_its_own_adapters_delta_and_base_rows_none(coupled: Callable[[BaseCard], Coupled]) -> None:
    house = coupled(CARD)
    a, b = house.pack(1, rank=4), house.pack(2, rank=8, targets=["q_proj", "down_proj"])
    house.resident(a.digest)
    house.resident(b.digest)
    geometry = CARD.geometry()
    for layer in range(2):
        for site in (Site.QKV, Site.O, Site.GATE_UP, Site.DOWN):
            x = _x(3, 2, 4, cols=geometry[layer, site].in_dim)
            y = torch.ones(9, geometry[layer, site].out_dim)
            _site(house.lora, house.rows((3, a), (2, b)), layer, site, torch.from_numpy(x), y)
            wanted = np.ones(y.shape)
            wanted[:3] += a.delta(layer, site, x[:3])
            wanted[3:5] += b.delta(layer, site, x[3:5])
            np.testing.assert_allclose(y.numpy(), wanted, rtol=2e-4, atol=2e-5)
            wrong = 1 + b.delta(layer, Site.QKV, x[:3]) if site is Site.QKV else wanted[:3] + 1
            assert np.abs(y.numpy()[:3] - wrong).max() > 1e-2, "another adapter's delta would be seen"
    for each in (a, b):
        house.lora.drop(each.digest)
    house.lora.check()


def test_a_site_that_no_row_adapts_sends_nothing(coupled: Callable[[BaseCard], Coupled]) -> None:
    house = coupled(CARD)
    b = house.pack(2, targets=["q_proj"])
    house.resident(b.digest)
    plan = house.lora.begin(house.rows((2, b)))
    assert plan is not None
    assert plan.adapts(0, Site.QKV)
    assert not plan.adapts(0, Site.DOWN)
    assert house.lora.submit(plan, 0, Site.DOWN, torch.zeros(2, 48)) is None
    house.lora.end(plan)


def test_a_moe_layer_matches_its_experts(coupled: Callable[[BaseCard], Coupled]) -> None:
    house = coupled(MOE_CARD)
    a = house.pack(1)
    house.resident(a.digest)
    rows, k, f, h = 6, 2, 24, 32
    ids = torch.from_numpy(np.random.default_rng(0).permuted(np.tile(np.arange(4), (rows, 1)), axis=1)[:, :k].copy())
    routing = Routing(ids.to(torch.int32), torch.rand(rows, k, generator=torch.Generator().manual_seed(1)))
    x, act = rows_of(rows, cols=h), rows_of(rows, cols=k * f, seed=1).view(rows, k, f)
    up, down = torch.zeros(rows, k, 2 * f), torch.zeros(rows, h)
    plan = house.lora.begin(house.rows((rows, a)))
    assert plan is not None
    house.lora.add(house.lora.submit(plan, 1, Site.MOE_GATE_UP, x, routing), up)
    house.lora.add(house.lora.submit(plan, 1, Site.MOE_DOWN, act, routing), down)
    house.lora.end(plan)
    wanted_up, wanted_down = np.zeros(up.shape), np.zeros(down.shape)
    for t in range(rows):
        for j in range(k):
            mlp = f"model.layers.1.mlp.experts.{ids[t, j]}"
            gate_up = np.concatenate([a.deltas[f"{mlp}.gate_proj"], a.deltas[f"{mlp}.up_proj"]])
            wanted_up[t, j] = gate_up @ x[t].numpy()
            wanted_down[t] += float(routing.topk_weights[t, j]) * (a.deltas[f"{mlp}.down_proj"] @ act[t, j].numpy())
    np.testing.assert_allclose(up.numpy(), wanted_up, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(down.numpy(), wanted_down, rtol=2e-4, atol=2e-5)


def test_an_adapter_that_does_not_exist_fails_in_words(coupled: Callable[[BaseCard], Coupled]) -> None:
    house = coupled(CARD)
    house.lora.want(MISSING)
    house.until(lambda: house.lora.view(MISSING).status is LeaseStatus.FAILED)
    assert house.lora.view(MISSING).error is not None
    house.lora.drop(MISSING)
    house.lora.check()


def test_a_lease_given_up_between_two_sites_loses_its_rows_and_adds_nothing(
    coupled: Callable[[BaseCard], Coupled],
) -> None:
    house = coupled(CARD)
    a = house.pack(1)
    house.resident(a.digest)
    plan = house.lora.begin(house.rows((2, a)))
    assert plan is not None
    ticket = house.lora.submit(plan, 0, Site.QKV, rows_of(2, cols=32))
    house.lora.drop(a.digest)
    y = torch.zeros(2, 64)
    with pytest.raises(StepLost) as lost:
        house.lora.add(ticket, y)
    assert lost.value.digests == {a.digest}
    assert isinstance(lost.value.__cause__, AdapterFailed)
    assert not y.any()
    house.lora.end(plan)
    house.lora.check()


def test_the_second_holder_keeps_the_lease_when_the_first_lets_go(coupled: Callable[[BaseCard], Coupled]) -> None:
    house = coupled(CARD)
    a = house.pack(1)
    house.resident(a.digest)
    house.lora.want(a.digest)
    house.lora.drop(a.digest)
    assert house.lora.view(a.digest).status is LeaseStatus.RESIDENT
    with pytest.raises(AssertionError, match="still held"):
        house.lora.check()
    house.lora.drop(a.digest)
    house.lora.check()


def test_another_tenancy_of_a_digest_is_another_lease_with_its_own_scales(
    coupled: Callable[[BaseCard], Coupled],
) -> None:
    lora = coupled(CARD).lora
    masks, leases = (1 << Site.QKV, 0, 0), []
    for generation in (1, 1, 2):
        scale = SiteScale(0, Site.QKV, torch.full((64,), float(generation)))
        lora._changed(
            LeaseState(
                MISSING,
                slot=0,
                slot_generation=generation,
                layer_sites=masks,
                layers_ready=3,
                scaled_sites=masks,
                scales=(scale,),
            )
        )
        lease = lora.view(MISSING).lease
        assert lease is not None
        assert lease.scales is not None
        leases.append(lease)
    assert leases[0] == leases[1], "news of one tenancy make no new layout"
    assert leases[2].slot_generation == 2
    factors = [lease.scales.on(0, Site.QKV, torch.device("cpu")) for lease in leases if lease.scales]
    assert [float(each[0]) for each in factors if each is not None] == [1.0, 1.0, 2.0]
