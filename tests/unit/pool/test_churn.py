"""Law 1 under churn: more adapters than slots, several holders, loads, evictions and cancellations all the time.

Every answer is either exactly that of the adapter that was asked for, or a refusal. With the compiled kernels.
"""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from typing_extensions import override

from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.pool.execute import SiteCall, StepWork, TenancyRows, execute
from infinilora.pool.pool import AdapterPool, LeaseState, PoolConfig
from infinilora.pool.tenancy import Limits
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterFailed
from infinilora.runtime.blobs import DirectoryBlobs
from support.cards import make_card
from support.pools import Packed, Told, pack, rows_of
from support.procs import wait_until

CARD = make_card("llama", num_layers=2)
NUM_ADAPTERS, NUM_SLOTS = 6, 3


class Engine(threading.Thread):
    """Leases, computes, releases; every so often it changes its mind, or uses a lease that it gave up."""

    def __init__(self, name: str, pool: AdapterPool, adapters: list[Packed], rounds: int, seed: int) -> None:
        super().__init__(name=name)
        self._pool = pool
        self._adapters = adapters
        self._rounds = rounds
        self._dice = random.Random(seed)
        self.computed = 0
        self.refused = 0
        self.failure: BaseException | None = None

    @override
    def run(self) -> None:
        try:
            for _ in range(self._rounds):
                self._round(self._dice.choice(self._adapters))
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._pool.drop(self.name)

    def _round(self, adapter: Packed) -> None:
        told = Told()
        self._pool.lease(self.name, adapter.digest, told)
        if self._dice.random() < 0.2:
            self._pool.release(self.name, adapter.digest)
            return
        state = told.resident()
        for _ in range(self._dice.randint(1, 3)):
            self._compute(state, adapter)
        self._pool.release(self.name, adapter.digest)
        if self._dice.random() < 0.3:
            with pytest.raises(AdapterFailed):
                self._compute(state, adapter)
            self.refused += 1

    def _compute(self, state: LeaseState, adapter: Packed) -> None:
        rows = self._dice.randint(1, 40)
        layer, site = self._dice.randrange(CARD.num_layers), self._dice.choice([Site.QKV, Site.O, Site.DOWN])
        geometry = CARD.geometry()[layer, site]
        x = rows_of(rows, cols=geometry.in_dim, seed=rows)
        out = torch.full((rows, geometry.out_dim), torch.nan)
        work = StepWork(1, [TenancyRows(0, rows, state.slot, state.slot_generation)])
        execute(self._pool.kernels, self._pool.grants(self.name), work, SiteCall(layer, site, 0, x, out))
        np.testing.assert_allclose(out, adapter.delta(layer, site, x.numpy()), atol=1e-4)
        self.computed += 1


def churn(work: Path, *, num_engines: int, rounds: int) -> None:
    blobs = DirectoryBlobs(work / "store")
    # Every other one adapts few sites: what its slot's former tenant adapted must be gone.
    some = [None, ["o_proj"]]
    adapters = [
        pack(work, blobs, CARD, seed=seed, rank=2 + 3 * seed, targets=some[seed % 2]) for seed in range(NUM_ADAPTERS)
    ]
    config = PoolConfig(
        base=CARD.fingerprint,
        num_layers=CARD.num_layers,
        capacity_bytes=3 * 100_000,
        num_slots=NUM_SLOTS,
        cache_dir=work / "cache",
        cache_bytes=200_000,
        loader_threads=2,
        limits=Limits(age_after_s=0.2),
    )
    deaths: list[BaseException] = []
    kernels = SlotKernels(num_slots=NUM_SLOTS, num_layers=CARD.num_layers + 1)
    pool = AdapterPool(config, blobs, kernels, on_death=deaths.append)
    engines = [Engine(f"engine-{i}", pool, adapters, rounds, seed=i) for i in range(num_engines)]
    dice = random.Random(99)
    for engine in engines:
        engine.start()
    while any(engine.is_alive() for engine in engines):
        hint = dice.choice([pool.stage, pool.evict])
        hint(dice.choice(adapters).digest)
        pool.check()
        engines[0].join(0.01)
    wait_until(lambda: not pool.load().waiting, "waits to end")
    for adapter in adapters:
        pool.evict(adapter.digest)
    wait_until(lambda: pool.load().bytes_free == pool.load().bytes_total, "all memory to come back")
    # A load that has no memory yet may still be on a thread that reads its header.
    wait_until(lambda: pool._loader.num_loads == 0, "loads that nobody wants to end")
    pool.check_idle()
    pool.close()
    assert not deaths
    assert not [engine.failure for engine in engines if engine.failure]
    assert sum(engine.computed for engine in engines) > num_engines * rounds / 2
    assert sum(engine.refused for engine in engines) > 0


def test_no_answer_is_ever_another_adapters(tmp_path: Path) -> None:
    churn(tmp_path, num_engines=4, rounds=40)


@pytest.mark.soak
def test_no_answer_is_ever_another_adapters_for_long(tmp_path: Path) -> None:
    churn(tmp_path, num_engines=8, rounds=5000)
