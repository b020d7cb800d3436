"""What a step adds over a real link from a real pool is the adapters' own, and the coupled mode's, at every site.

Of an adapter with column scales the base's output is multiplied first: y = y * factors + delta.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.grouplink import Identity as EngineIdentity
from infinilora.engine.lora.hybrid import HybridLora
from infinilora.engine.lora.interface import AdapterRows, LeaseStatus, LoraBackend, Routing
from infinilora.engine.lora.local import GROUP, LocalLora
from infinilora.engine.lora.remote import RemoteLora
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.open import LinkSettings, Opener
from infinilora.lora_server.leases import SERVICE, Identity, LoraServer
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.protocol.adapter import MOE_SITES, BaseCard, Site
from infinilora.protocol.ids import Digest
from infinilora.runtime import rpc
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.rpc import Channels
from infinilora.runtime.service import Service
from infinilora.runtime.telemetry import Telemetry
from support.cards import make_card, tiny_cards
from support.pools import Packed, pack
from support.scaled import Scaled, pack_scaled
from support.waiting import eventually

COUNTS = (3, 40, 1, 5)
BASE_ROWS = 2
TOPK = 2


@dataclass
class Case:
    """A family, adapters of several ranks and targets, and where their packed files are."""

    card: BaseCard
    blobs: DirectoryBlobs
    adapters: list[Packed]
    work: Path

    def pool(self, name: str) -> AdapterPool:
        config = PoolConfig(
            base=self.card.fingerprint,
            num_layers=self.card.num_layers,
            capacity_bytes=8 << 20,
            num_slots=8,
            cache_dir=self.work / name,
            cache_bytes=8 << 20,
        )
        kernels = SlotKernels(num_slots=8, num_layers=self.card.num_layers + 1)
        return AdapterPool(config, self.blobs, kernels, on_death=_die)


def _die(error: BaseException) -> None:
    raise error


CARDS = tiny_cards() | {"outer": make_card("llama", num_layers=1, vocab_size=5000, outer=True)}
"""A row of the last one's vocabulary takes 20,000 bytes, more than a buffer of these links."""
OUTER = ["q_proj", "embed_tokens", "lm_head"]


@pytest.fixture(params=sorted(CARDS))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    card, blobs = CARDS[request.param], DirectoryBlobs(tmp_path / "store")
    attention = ["q_proj", "v_proj"]
    if request.param == "outer":
        targets = [OUTER, attention, OUTER]
        adapters = [pack(tmp_path, blobs, card, seed=i, rank=3 + i, targets=t) for i, t in enumerate(targets)]
        adapters.append(pack_scaled(tmp_path, blobs, card, seed=9, rank=2, targets=["k_proj", "lm_head"]))
        return Case(card, blobs, adapters, tmp_path)
    adapters = [
        pack(tmp_path, blobs, card, seed=1, rank=4),
        pack(tmp_path, blobs, card, seed=2, rank=16, targets=attention),
        pack(tmp_path, blobs, card, seed=3, rank=8, dtype="BF16"),
        pack_scaled(tmp_path, blobs, card, seed=4, rank=5),
    ]
    return Case(card, blobs, adapters, tmp_path)


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


def is_idle(pool: AdapterPool) -> bool:
    """A load that has told its last layer takes a moment more to end."""
    try:
        pool.check_idle()
    except AssertionError:
        return False
    return True


def is_resident(lora: LoraBackend, digest: Digest) -> bool:
    return lora.view(digest).status is LeaseStatus.RESIDENT


async def rows_of(lora: LoraBackend, case: Case) -> list[AdapterRows]:
    rows, at = [], 0
    for packed, count in zip(case.adapters, COUNTS, strict=True):
        lora.want(packed.digest)
        digest = packed.digest
        await eventually(partial(is_resident, lora, digest), "the adapter is resident")
        lease = lora.view(digest).lease
        assert lease is not None
        rows.append(AdapterRows(at, count, lease))
        at += count
    # As the runner orders them: by slot. Here slots follow the order of arrival.
    return rows


def inputs(case: Case, site: Site, in_dim: int) -> tuple[Tensor, Routing | None]:
    rows = sum(COUNTS) + BASE_ROWS
    dice = torch.Generator().manual_seed(int(site))
    if site is Site.EMBED:
        return torch.randint(0, in_dim, (rows, 1), generator=dice, dtype=torch.int32), None
    if site not in MOE_SITES:
        return torch.randn(rows, in_dim, generator=dice), None
    experts = next(s.num_experts for s in case.card.sites if s.site == site)
    ids = torch.rand(rows, experts, generator=dice).argsort(1)[:, :TOPK].to(torch.int32)
    routing = Routing(ids, torch.rand(rows, TOPK, generator=dice))
    shape = (rows, TOPK, in_dim) if site is Site.MOE_DOWN else (rows, in_dim)
    return torch.randn(*shape, generator=dice), routing


def outputs(site: Site, out_dim: int) -> Tensor:
    """What the base has computed of a site when deltas are added."""
    shape = (sum(COUNTS) + BASE_ROWS, *((TOPK,) if site is Site.MOE_GATE_UP else ()), out_dim)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(out_dim))


def factors(packed: Packed, layer: int, site: Site) -> np.ndarray | float:
    return packed.factors.get((layer, site), 1.0) if isinstance(packed, Scaled) else 1.0


def wanted(packed: Packed, layer: int, site: Site, x: Tensor, routing: Routing | None) -> np.ndarray:
    """The definition, in float64."""
    if site is Site.EMBED:
        x = torch.nn.functional.one_hot(x[:, 0].long(), packed.card.vocab_size).float()
    if routing is None:
        return packed.delta(layer, site, x.numpy())
    parts = packed.card.geometry()[layer, site].parts
    rows = []
    for t in range(x.shape[0]):
        outs = []
        for j, expert in enumerate(routing.topk_ids[t].tolist()):
            row = (x[t, j] if site is Site.MOE_DOWN else x[t]).double().numpy()
            none = [np.zeros((p.out_dim, row.shape[0])) for p in parts]
            named = [
                packed.deltas.get(p.module.replace("{expert}", str(expert)), z)
                for p, z in zip(parts, none, strict=True)
            ]
            outs.append(np.concatenate(named) @ row)
        weights = routing.topk_weights[t].double().numpy()
        rows.append(weights @ np.stack(outs) if site is Site.MOE_DOWN else np.stack(outs))
    return np.stack(rows)


async def every_site(
    lora: LoraBackend, case: Case, check: Callable[[int, Site, Tensor], None], *, groups: list[str] | None = None
) -> None:
    """Run each site of each layer once as one step, and show what became of `outputs`. `groups`: who computes what."""
    rows = await rows_of(lora, case)
    assert groups in (None, [segment.lease.group for segment in rows])
    plan = lora.begin(rows)
    assert plan is not None
    for geometry in case.card.sites:
        layer, site = geometry.layer, geometry.site
        x, routing = inputs(case, site, geometry.in_dim)
        y = outputs(site, geometry.out_dim)
        await asyncio.to_thread(lora.add, lora.submit(plan, layer, site, x, routing), y)
        check(layer, site, y)
    lora.end(plan)
    for packed in case.adapters:
        lora.drop(packed.digest)
    if groups is None:
        lora.check()


def is_right(case: Case, layer: int, site: Site, y: Tensor) -> None:
    x, routing = inputs(case, site, case.card.geometry()[layer, site].in_dim)
    before, at = outputs(site, case.card.geometry()[layer, site].out_dim), 0
    for packed, count in zip(case.adapters, COUNTS, strict=True):
        rows = slice(at, at + count)
        part = None if routing is None else Routing(routing.topk_ids[rows], routing.topk_weights[rows])
        scaled = before[rows].double().numpy() * factors(packed, layer, site)
        found = y[rows].double().numpy() - scaled
        delta = wanted(packed, layer, site, x[rows], part)
        np.testing.assert_allclose(found, delta, rtol=5e-4, atol=5e-5, err_msg=f"{layer} {site.label}")
        at += count
    assert torch.equal(y[at:], before[at:]), "base rows get nothing"


@asynccontextmanager
async def living() -> AsyncIterator[Service]:
    """A service without its process: `live` would end this one by its watchdog."""
    service = Service("test")
    async with service._group:
        yield service
        for task in service._tasks:
            task.cancel()


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
