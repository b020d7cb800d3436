"""What a step adds over a real link from a real pool is the adapters' own, and the coupled mode's, at every site.

Of an adapter with column scales the base's output is multiplied first: y = y * factors + delta. All of it in one call a
site, and in two that are under way at one time.
"""

from functools import partial
from pathlib import Path

import pytest

from infinilora.engine.lora.hybrid import HybridLora
from infinilora.engine.lora.interface import LoraBackend
from infinilora.engine.lora.local import GROUP, LocalLora
from support.every_site import (
    CARDS,
    COUNTS,
    Case,
    every_site,
    is_idle,
    is_resident,
    is_right,
    living,
    make_case,
    outputs,
)
from support.lora_inside import remote
from support.waiting import eventually

CUTS = (0, 12, sum(COUNTS))
"""Whole; within the rows of the second adapter; between those of the last one and the base."""


@pytest.fixture(params=sorted(CARDS))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return make_case(request.param, tmp_path)


async def is_right_at_every_site(lora: LoraBackend, case: Case, cut: int, *, groups: list[str] | None = None) -> None:
    seen = await every_site(lora, case, groups=groups, cut=cut)
    assert len(seen) == len(case.card.sites)
    for (layer, site), y in seen.items():
        is_right(case, layer, site, y)
    moved = (float((y - outputs(site, y.shape[-1])).abs().max()) for (_, site), y in seen.items())
    assert max(moved) > 0.01, "the adapters do move something"


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_remote_deltas_are_the_adapters_own(case: Case, backend: str) -> None:
    async with living() as service, remote(case, service, backend) as lora:
        for cut in CUTS:
            await is_right_at_every_site(lora, case, cut)


@pytest.mark.parametrize("cut", CUTS)
async def test_an_engine_with_some_adapters_of_its_own_adds_the_same(case: Case, cut: int) -> None:
    """Neighbouring rows are computed here, there, here, there."""
    hot = [case.adapters[0].digest, case.adapters[2].digest]
    async with living() as service, remote(case, service, "shm") as lora:
        pool = case.pool("hybrid")
        own = LocalLora(pool, lambda: None)
        both = HybridLora(lora, own, pool)
        for digest in hot:
            both.want(digest)
            both.want(digest)
            await eventually(partial(is_resident, own, digest), "the hot adapter is here")
        await is_right_at_every_site(both, case, cut, groups=[GROUP, "g"] * 2)
        assert {each.digest for each in case.adapters if is_resident(own, each.digest)} == set(hot)
        for digest in 2 * hot:
            both.drop(digest)
        both.check()
        own.close()
        await eventually(partial(is_idle, pool), "the pool is idle")
        pool.close()


async def test_the_coupled_mode_adds_the_same(case: Case) -> None:
    pool = case.pool("local")
    lora = LocalLora(pool, lambda: None)
    for cut in CUTS:
        await is_right_at_every_site(lora, case, cut)
    lora.close()
    await eventually(partial(is_idle, pool), "the pool is idle")
    pool.close()
