"""What shards of an engine get for their slices of every site is, together, what one engine would get for all of it.

The cut is the test's own, as uneven as can be; the base's partial products are halves, whose sum is exact. Held against
the definition in float64, over links to a server, to a group that cuts experts itself, and from pools of the shards.
"""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinilora.engine.lora.interface import LoraBackend, Routing
from infinilora.engine.lora.local import LocalLora
from infinilora.pool.share import Share
from infinilora.pool.slices import SiteSlice, SiteSlices
from infinilora.protocol.adapter import Site, SiteEntry
from infinilora.protocol.shards import Shape
from support.every_site import CARDS, Case, inputs, is_idle, is_right, living, make_case, outputs, rows_of
from support.lora_groups import LoraGroup, engine_of
from support.procs import NatsServer, ValkeyServer
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

WHOLE_ON_EACH = (Site.EMBED, Site.SHARED_GATE)
ON_THE_HEAD = (Site.ROUTER, Site.LM_HEAD)
PARTIAL = (Site.O, Site.SHARED_DOWN, Site.MOE_DOWN)
EXPERTS = (range(2), range(2, 5))
CUTS: tuple[dict[Site, SiteSlice], ...] = (
    {
        Site.QKV: SiteSlice(outputs=((0, 24), (32, 33), (48, 56))),
        Site.O: SiteSlice(inputs=(0, 9)),
        Site.SHARED_GATE_UP: SiteSlice(outputs=((0, 13), (40, 53))),
        Site.SHARED_DOWN: SiteSlice(inputs=(0, 13)),
    },
    {
        Site.QKV: SiteSlice(outputs=((24, 32), (33, 48), (56, 64))),
        Site.O: SiteSlice(inputs=(9, 32)),
        Site.SHARED_GATE_UP: SiteSlice(outputs=((13, 40), (53, 80))),
        Site.SHARED_DOWN: SiteSlice(inputs=(13, 40)),
    },
)
"""Of a base with q, k, v of 32, 16, 16 columns, experts, and a shared expert of 40 columns."""


def slices_of(case: Case, shard: int) -> SiteSlices:
    return {(s.layer, s.site): CUTS[shard][s.site] for s in case.card.sites if s.site in CUTS[shard]}


async def added(case: Case, lora: LoraBackend, shard: int) -> dict[tuple[int, Site], Tensor]:
    """What one shard has at every site after the deltas of its slice are added."""
    plan = lora.begin(await rows_of(lora, case))
    assert plan is not None
    seen: dict[tuple[int, Site], Tensor] = {}
    for geometry in case.card.sites:
        layer, site = geometry.layer, geometry.site
        if shard and site in ON_THE_HEAD:
            continue
        x, routing = inputs(case, site, geometry.in_dim)
        y, cut = outputs(site, geometry.out_dim), CUTS[shard].get(site, SiteSlice())
        if cut.inputs is not None:
            x = x[:, slice(*cut.inputs)].contiguous()
        if cut.outputs:
            y = torch.cat([y[:, slice(*run)] for run in cut.outputs], 1)
        if routing is not None:
            is_own = torch.isin(routing.topk_ids, torch.tensor(EXPERTS[shard]))
            routing = Routing(torch.where(is_own, routing.topk_ids, -1), routing.topk_weights)
            y = y * is_own[:, :, None] if site is Site.MOE_GATE_UP else y
        if site in PARTIAL:
            y = y / 2
        await asyncio.to_thread(lora.add, lora.submit(plan, layer, site, x, routing), y)
        seen[layer, site] = y
    lora.end(plan)
    for packed in case.adapters:
        lora.drop(packed.digest)
    lora.check()
    return seen


def check(case: Case, shards: list[dict[tuple[int, Site], Tensor]]) -> None:
    """Put together what the shards have, each thing once."""
    for geometry in case.card.sites:
        layer, site = geometry.layer, geometry.site
        parts = [seen[layer, site] for seen in shards if (layer, site) in seen]
        if site in ON_THE_HEAD or site in WHOLE_ON_EACH:
            for part in parts:
                is_right(case, layer, site, part)
            continue
        if site in PARTIAL or site is Site.MOE_GATE_UP:
            is_right(case, layer, site, parts[0] + parts[1])
            continue
        whole = torch.full((len(parts[0]), geometry.out_dim), torch.nan)
        for cut, part in zip(CUTS, parts, strict=True):
            at = 0
            for begin, end in cut[site].outputs:
                whole[:, begin:end] = part[:, at : at + end - begin]
                at += end - begin
        is_right(case, layer, site, whole)


@pytest.mark.parametrize(("shape", "backends"), [("1x1", ["shm", "tcp"]), ("2x1", ["shm"])], ids=["one", "group"])
async def test_slices_over_links_are_the_whole(
    shape: str, backends: list[str], tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer
) -> None:
    group = LoraGroup(tmp_path, CARDS["everything"], Shape.parse(shape), nats_server, redis_server)
    try:
        group.start()
        case = make_case("everything", tmp_path, group.blobs)
        for backend in backends:
            async with living() as service, AsyncExitStack() as stack:
                seen = []
                for shard in (0, 1):
                    opening = engine_of((group,), service, backend=backend, slices=slices_of(case, shard))
                    seen.append(await added(case, await stack.enter_async_context(opening), shard))
            check(case, seen)
    finally:
        group.close()


def share_of(case: Case, shard: int) -> Share:
    def held(entry: SiteEntry) -> range:
        return EXPERTS[shard] if entry.num_experts else range(shard == 0 or entry.site not in ON_THE_HEAD)

    return Share(f"shard {shard}", held, slices_of(case, shard))


@pytest.mark.parametrize("host_bytes", [0, 8 << 20], ids=["disk", "host memory"])
async def test_pools_that_hold_the_shards_share_alone_give_the_whole(host_bytes: int, tmp_path: Path) -> None:
    """Three times: from the store, then from the tiers, then once more with cached files that are wrong."""
    case = make_case("everything", tmp_path)
    pools = [case.pool(f"shard-{shard}", share_of(case, shard), host_bytes=host_bytes) for shard in (0, 1)]
    for source in ("store", "near", "spoilt"):
        seen = []
        for shard, pool in enumerate(pools):
            if source == "spoilt":
                spoil(tmp_path / f"shard-{shard}")
            lora = LocalLora(pool, lambda: None, first_expert=EXPERTS[shard].start)
            seen.append(await added(case, lora, shard))
            lora.close()
            for packed in case.adapters:
                pool.evict(packed.digest)
            await eventually(partial(is_idle, pool), "the pool is idle")
            assert not pool.resident()
        check(case, seen)
    for pool in pools:
        pool.close()


def spoil(cache: Path) -> None:
    """The last byte of each file is another."""
    for path in cache.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
