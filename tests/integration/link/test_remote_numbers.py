"""What a step adds over a real link from a real pool is the adapters' own, and the coupled mode's, at every site.

Of an adapter with column scales the base's output is multiplied first: y = y * factors + delta.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.grouplink import Identity as EngineIdentity
from infinilora.engine.lora.hybrid import HybridLora
from infinilora.engine.lora.local import GROUP, LocalLora
from infinilora.engine.lora.remote import RemoteLora
from infinilora.link.open import LinkSettings, Opener
from infinilora.lora_server.leases import SERVICE, Identity, LoraServer
from infinilora.protocol.adapter import Site
from infinilora.runtime import rpc
from infinilora.runtime.rpc import Channels
from infinilora.runtime.service import Service
from infinilora.runtime.telemetry import Telemetry
from support.every_site import (
    BASE_ROWS,
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
from support.waiting import eventually


@pytest.fixture(params=sorted(CARDS))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return make_case(request.param, tmp_path)


@asynccontextmanager
async def remote(case: Case, service: Service, backend: str) -> AsyncIterator[RemoteLora]:
    """A LoRA server's door, pool and serving threads in this process, and an engine's back-end linked to it."""
    directory = case.work if backend == "shm" else None
    link = LinkSettings(directory=directory, num_buffers=4, buffer_bytes=8192)
    pool, opener = case.pool("remote"), Opener(link)
    server = LoraServer(Identity("g", case.card.fingerprint), pool, opener, service, traces=Telemetry())
    identity = EngineIdentity(
        engine_id="e", incarnation="1", base=case.card.fingerprint, dtype="F32", max_rows=sum(COUNTS) + BASE_ROWS
    )
    async with rpc.serving("127.0.0.1:0", [(SERVICE, server)], grace_s=0.5) as listening, Channels() as channels:
        lora = RemoteLora(case.card, identity, channels=channels, link=link, on_change=lambda: None)
        running = service.spawn(lora.run(), "links")
        lora.update_groups([Group(name="g", address=listening.address, incarnation="i")])
        await eventually(lambda: lora.open_links == {"g": backend}, "the link is open")
        yield lora
        lora.close()
        running.cancel()
        await eventually(lambda: not server.open_links, "the server saw the end of the link")
    opener.close()
    await eventually(partial(is_idle, pool), "the pool is idle")
    pool.close()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_remote_deltas_are_the_adapters_own(case: Case, backend: str) -> None:
    seen: dict[tuple[int, Site], Tensor] = {}

    async with living() as service, remote(case, service, backend) as lora:
        await every_site(lora, case, lambda layer, site, y: seen.update({(layer, site): y}))
    assert len(seen) == len(case.card.sites)
    for (layer, site), y in seen.items():
        is_right(case, layer, site, y)
    moved = (float((y - outputs(site, y.shape[-1])).abs().max()) for (_, site), y in seen.items())
    assert max(moved) > 0.01, "the adapters do move something"


async def test_an_engine_with_some_adapters_of_its_own_adds_the_same(case: Case) -> None:
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
        seen: dict[tuple[int, Site], Tensor] = {}
        await every_site(both, case, lambda layer, site, y: seen.update({(layer, site): y}), groups=[GROUP, "g"] * 2)
        for (layer, site), y in seen.items():
            is_right(case, layer, site, y)
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
    await every_site(lora, case, lambda layer, site, y: is_right(case, layer, site, y))
    lora.close()
    await eventually(partial(is_idle, pool), "the pool is idle")
    pool.close()
