"""A slot outlives what was launched with it, on a device that runs launches later than they are made.

Each test lets another adapter into the only slot while a launch of the former one has not run: had its memory been
given up, the launch would compute with the other's weights.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from infinilora.pool.execute import SiteCall, StepWork, TenancyRows, execute
from infinilora.pool.pool import AdapterPool, LeaseState, PoolConfig
from infinilora.protocol.adapter import Site
from infinilora.protocol.shards import Shape
from infinilora.runtime.blobs import DirectoryBlobs
from support.cards import make_card
from support.late_device import LateDevice, LateKernels
from support.pools import Packed, Told, pack, rows_of
from support.procs import wait_until
from support.sharded_pools import GroupOfPools

CARD = make_card("llama", num_layers=2)
LAYER, SITE, ROWS = 1, Site.O, 3


class House:
    """A pool of one slot on a late device; three adapters in its store."""

    def __init__(self, work: Path, num_slots: int = 1) -> None:
        self.device = LateDevice()
        self.kernels = LateKernels(self.device)
        blobs = DirectoryBlobs(work / "store")
        self.adapters = [pack(work, blobs, CARD, seed=seed) for seed in range(3)]
        config = PoolConfig(
            base=CARD.fingerprint,
            num_layers=CARD.num_layers,
            capacity_bytes=1 << 20,
            num_slots=num_slots,
            cache_dir=work / "cache",
            cache_bytes=1 << 20,
            device=self.device,
        )
        self.deaths: list[BaseException] = []
        self.pool = AdapterPool(config, blobs, self.kernels, on_death=self.deaths.append)
        self.x = rows_of(ROWS, cols=CARD.geometry()[LAYER, SITE].in_dim)

    def lease(self, adapter: Packed, holder: str = "engine") -> LeaseState:
        told = Told()
        self.pool.lease(holder, adapter.digest, told)
        return told.resident()

    def launch(self, state: LeaseState, holder: str = "engine") -> Tensor:
        """One site call of this tenancy, launched and not run."""
        out = torch.full((ROWS, CARD.geometry()[LAYER, SITE].out_dim), torch.nan)
        work = StepWork(1, [TenancyRows(0, ROWS, state.slot, state.slot_generation)])
        execute(self.kernels, self.pool.grants(holder), work, SiteCall(LAYER, SITE, 0, self.x, out))
        assert out.isnan().all(), "the call has only been launched"
        return out

    def expect(self, out: Tensor, adapter: Packed) -> None:
        np.testing.assert_allclose(out, adapter.delta(LAYER, SITE, self.x.numpy()), atol=1e-5)

    def other_is_about_to_have_the_slot(self, told: Told) -> Callable[[], bool]:
        """It has it, or waits for launches."""
        return lambda: bool(told.states) or self.pool._retiring.num_leaving > 0


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.device.launches.run()
    house.pool.check()
    house.pool.close()
    assert not house.deaths


@pytest.mark.parametrize("how", ["released", "link ended", "evicted by hand"])
def test_a_slot_is_given_away_only_when_what_was_launched_with_it_has_run(house: House, how: str) -> None:
    one, other, _ = house.adapters
    out = house.launch(house.lease(one))
    if how == "link ended":
        house.pool.drop("engine")
    else:
        house.pool.release("engine", one.digest)
    if how == "evicted by hand":
        house.pool.evict(one.digest)
    told = Told()
    house.pool.lease("engine", other.digest, told)
    wait_until(house.other_is_about_to_have_the_slot(told), "the other to be next")
    house.device.launches.run()
    house.expect(out, one)
    again = house.launch(told.resident())
    house.device.launches.run()
    house.expect(again, other)


def test_every_holders_launches_are_waited_for(house: House) -> None:
    one, other, _ = house.adapters
    outs = {holder: house.launch(house.lease(one, holder), holder) for holder in ("first", "second")}
    for holder in outs:
        house.pool.release(holder, one.digest)
    told = Told()
    house.pool.lease("third", other.digest, told)
    wait_until(house.other_is_about_to_have_the_slot(told), "the other to be next")
    house.device.launches.run()
    for out in outs.values():
        house.expect(out, one)
    assert told.resident().is_resident


def test_a_slot_that_waits_for_launches_holds_up_nobody_else(tmp_path: Path) -> None:
    house = House(tmp_path, num_slots=2)
    one, other, third = house.adapters
    out = house.launch(house.lease(one))
    house.lease(other)
    house.pool.release("engine", one.digest)
    told = Told()
    house.pool.lease("engine", third.digest, told)
    wait_until(house.other_is_about_to_have_the_slot(told), "the third to be next")
    assert house.lease(other, "another engine").is_resident
    assert house.pool._retiring.num_leaving == 1
    house.device.launches.run()
    assert told.resident().is_resident
    house.expect(out, one)
    house.pool.close()


def test_a_slot_whose_launches_have_run_is_given_away_at_once(house: House) -> None:
    one, other, _ = house.adapters
    out = house.launch(house.lease(one))
    house.device.launches.run()
    house.pool.release("engine", one.digest)
    assert house.lease(other).is_resident
    assert house.pool._retiring._thread is None, "nobody had to be asked again"
    house.expect(out, one)


def test_a_layer_is_ready_only_when_its_copy_has_run(house: House) -> None:
    one, _, _ = house.adapters
    house.device.copies.is_held = True
    told = Told()
    house.pool.lease("engine", one.digest, told)
    for layer in range(CARD.num_layers + 1):
        wait_until(lambda count=layer + 1: house.device.copies.launched >= count, "the layer to be copied")  # type: ignore[misc]
        assert max((state.layers_ready for state in told.states), default=0) <= layer
        house.device.copies.run()
    out = house.launch(told.resident())
    house.device.launches.run()
    house.expect(out, one)


def test_a_shard_that_follows_says_it_is_empty_only_when_its_launches_have_run(tmp_path: Path) -> None:
    """The second of two stages computes the last layer; its head is a host."""
    device = LateDevice()
    blobs = DirectoryBlobs(tmp_path / "store")
    one, other = (pack(tmp_path, blobs, CARD, seed=seed) for seed in range(2))
    group = GroupOfPools(CARD, Shape(1, 2), blobs, tmp_path, num_slots=1, follower_device=device)
    follower = group.followers[1]
    told, x = Told(), rows_of(ROWS, cols=CARD.geometry()[LAYER, SITE].in_dim)
    group.head.lease("engine", one.digest, told)
    state = told.resident()
    out = torch.full((ROWS, CARD.geometry()[LAYER, SITE].out_dim), torch.nan)
    work = StepWork(1, [TenancyRows(0, ROWS, state.slot, state.slot_generation)])
    execute(follower.kernels, group.grants(1), work, SiteCall(LAYER, SITE, 0, x, out))
    group.head.release("engine", one.digest)
    told = Told()
    group.head.lease("engine", other.digest, told)
    wait_until(lambda: bool(told.states) or follower._retiring.num_leaving > 0, "the other to be next")
    device.launches.run()
    np.testing.assert_allclose(out, one.delta(LAYER, SITE, x.numpy()), atol=1e-5)
    assert told.resident().is_resident
    group.close()
