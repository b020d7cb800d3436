"""Steps of a remote back-end that come again: the same rows with other values, other rows, links that come and go."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinilora.engine.lora.interface import AdapterRows, Lease, Routing, StepLost, StepPlan, Ticket
from infinilora.engine.lora.remote import KEPT_CALLS, RemoteLora
from infinilora.protocol.adapter import Site
from infinilora.protocol.ids import Digest
from support.cards import make_card
from support.fleets import Fleet, fleet
from support.groups import ScriptedGroup, delta_of, echo_of, serving
from support.waiting import eventually

CARD = make_card("qwen3_moe", num_layers=3, num_experts=4, intermediate=24, vocab_size=5000, outer=True)
"""A row of its vocabulary takes 20,000 bytes, more than a buffer of these links."""
SITES = (Site.QKV, Site.O, Site.MOE_GATE_UP, Site.MOE_DOWN)
INNER = sum(1 << site for site in SITES)
LAYER_SITES = [INNER | 1 << Site.EMBED, INNER, INNER, 1 << Site.LM_HEAD]
A, B = Digest("sha256:" + "a" * 64), Digest("sha256:" + "b" * 64)
TOPK = 2
every_backend = pytest.mark.parametrize("backend", ["shm", "tcp"])


@dataclass
class Call:
    """One site call of a step: what goes in, what it is added to, and what must come of it."""

    layer: int
    site: Site
    x: Tensor
    y: Tensor
    routing: Routing | None
    wanted: Tensor


def whole(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: sums of them are exact in every dtype."""
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def make_call(rows: list[AdapterRows], layer: int, site: Site, seed: int, count: int, dtype: torch.dtype) -> Call:
    """A call of `count` rows, those under no lease included, with values of the seed's."""
    rng = torch.Generator().manual_seed(seed)
    geometry, routing = CARD.geometry()[layer, site], None
    x, y = whole(rng, count, geometry.in_dim, dtype=dtype), whole(rng, count, geometry.out_dim, dtype=dtype)
    if site in (Site.MOE_GATE_UP, Site.MOE_DOWN):
        routing = Routing(whole(rng, count, TOPK, dtype=torch.int32), whole(rng, count, TOPK, dtype=torch.float32))
    if site is Site.MOE_GATE_UP:
        y = whole(rng, count, TOPK, geometry.out_dim, dtype=dtype)
    elif site is Site.MOE_DOWN:
        x = whole(rng, count, TOPK, geometry.in_dim, dtype=dtype)
    elif site is Site.EMBED:
        x = whole(rng, count, 1, dtype=torch.int32)
    return Call(layer, site, x, y, routing, wanted_of(rows, layer, site, x, y, routing))


def wanted_of(rows: list[AdapterRows], layer: int, site: Site, x: Tensor, y: Tensor, routing: Routing | None) -> Tensor:
    ids, weights = (None, None) if routing is None else (routing.topk_ids, routing.topk_weights)
    if site is not Site.MOE_DOWN:
        weights = None
    if site is Site.EMBED:
        x, ids = x[:, :0], x
    wanted = y.clone().flatten(1)
    for start, number, lease in rows:
        if not lease.layer_sites[layer] >> site & 1:
            continue
        at = slice(start, start + number)
        echo = echo_of(
            x[at],
            None if ids is None else ids[at],
            None if weights is None else weights[at],
            range(wanted.shape[1]),
        )
        delta = delta_of(lease.slot, lease.slot_generation, layer, site) + echo
        wanted[at] = (wanted[at].float() + delta.to(y.dtype).float()).to(y.dtype)
    return wanted.view(y.shape)


def submit(lora: RemoteLora, plan: StepPlan, call: Call) -> Ticket:
    ticket = lora.submit(plan, call.layer, call.site, call.x, call.routing)
    assert ticket is not None
    return ticket


async def run(
    f: Fleet, rows: list[AdapterRows], seed: int, *, base_rows: int = 1, dtype: torch.dtype = torch.float32
) -> None:
    """One whole step, every site of every layer: each must be as wanted. Raises StepLost."""
    plan = begin(f.lora, rows)
    try:
        count = plan.num_rows + base_rows
        places = [(0, Site.EMBED), *((layer, site) for layer in range(3) for site in SITES), (3, Site.LM_HEAD)]
        for layer, site in places:
            call = make_call(rows, layer, site, seed + layer, count, dtype)
            ticket = f.lora.submit(plan, layer, site, call.x, call.routing)
            await asyncio.to_thread(f.lora.add, ticket, call.y)
            assert torch.equal(call.y, call.wanted), (layer, site)
    finally:
        f.lora.end(plan)


def begin(lora: RemoteLora, rows: list[AdapterRows]) -> StepPlan:
    plan = lora.begin(rows)
    assert plan is not None
    return plan


def fleet_of(directory: Path | None, dtype: str = "F32") -> AbstractAsyncContextManager[Fleet]:
    return fleet(directory, card=CARD, layer_sites=LAYER_SITES, dtype=dtype)


@asynccontextmanager
async def linked(directory: Path | None, dtype: str = "F32") -> AsyncIterator[tuple[Fleet, ScriptedGroup]]:
    """One group, g, that answers with what it was sent, and an open link to it."""
    async with fleet_of(directory, dtype) as f, serving(f.group("g")) as group:
        group.echoes = True
        f.know(group)
        await f.linked("g")
        yield f, group


def directory_of(backend: str, tmp_path: Path) -> Path | None:
    return tmp_path if backend == "shm" else None


@every_backend
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.bfloat16, "BF16")])
async def test_steps_of_the_same_rows_are_right_each_time(
    backend: str, dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    async with linked(directory_of(backend, tmp_path), dtype=name) as (f, group):
        a, b = await f.lease(A), await f.lease(B)
        rows = [AdapterRows(0, 2, a), AdapterRows(2, 3, b)]
        for step, base_rows in enumerate((1, 1, 0, 4, 4, 1)):
            await run(f, rows, seed=10 * step, base_rows=base_rows, dtype=dtype)
        assert len({c.header.step_id for c in group.site_calls}) == 6
        f.drop(A, B)


@every_backend
async def test_rows_that_change_and_come_back_are_right_each_time(backend: str, tmp_path: Path) -> None:
    async with linked(directory_of(backend, tmp_path)) as (f, _):
        a, b = await f.lease(A), await f.lease(B)
        some = [
            [AdapterRows(0, 2, a), AdapterRows(2, 3, b)],
            [AdapterRows(0, 3, a), AdapterRows(3, 2, b)],
            [AdapterRows(0, 2, b), AdapterRows(2, 3, a)],
            *([AdapterRows(0, n, a)] for n in range(1, KEPT_CALLS + 1)),
            [AdapterRows(0, 40, a), AdapterRows(40, 60, b)],
        ]
        for seed, rows in enumerate([*some, *some[::-1], some[0], some[1], some[0], some[1]]):
            await run(f, rows, seed=seed)
        f.drop(A, B)


async def test_layers_may_adapt_other_rows_than_their_neighbours(tmp_path: Path) -> None:
    """A has nothing in layer 1 and B only that and layer 2: the rows that are sent differ from layer to layer."""
    async with linked(tmp_path) as (f, group):
        a, b = await f.lease(A), await f.lease(B)
        of_a, of_b = [*LAYER_SITES], [*LAYER_SITES]
        of_a[1], of_b[0] = 0, 1 << Site.EMBED
        rows = [
            AdapterRows(0, 2, replace(a, layer_sites=tuple(of_a))),
            AdapterRows(2, 3, replace(b, layer_sites=tuple(of_b))),
        ]
        for seed in range(3):
            await run(f, rows, seed)
        sent = {(c.header.layer, c.header.row_start, c.header.rows) for c in group.site_calls if c.header.site in SITES}
        assert sent == {(0, 0, 2), (1, 2, 3), (2, 0, 5)}
        f.drop(A, B)


async def test_a_new_tenancy_of_the_same_slot_is_told_to_the_server(tmp_path: Path) -> None:
    async with linked(tmp_path) as (f, _):
        a = await f.lease(A)
        for generation in (1, 1, 2, 2, 1):
            lease = Lease(A, "g", a.slot, generation, a.layer_sites)
            await run(f, [AdapterRows(0, 3, lease)], seed=generation)
        f.drop(A)


async def two_groups(f: Fleet) -> list[AdapterRows]:
    """Rows of A under a lease of g, and of B under one of h."""
    f.lora.place({A: ("g",), B: ("h",)})
    await f.linked("g", "h")
    return [AdapterRows(0, 2, await f.lease(A)), AdapterRows(2, 5, await f.lease(B))]


@every_backend
async def test_a_group_that_comes_back_serves_the_same_rows_and_one_that_is_gone_costs_its_own(
    backend: str, tmp_path: Path
) -> None:
    async with fleet_of(directory_of(backend, tmp_path)) as f, serving(f.group("g")) as g:
        async with serving(f.group("h")) as h:
            g.echoes = h.echoes = True
            f.know(g, h)
            rows = await two_groups(f)
            assert [r.lease.group for r in rows] == ["g", "h"]
            for seed in range(3):
                await run(f, rows, seed)
            h.end_streams()
            await eventually(lambda: len(h.hellos) == 2 and "h" in f.lora.open_links, "another link to it")
            for seed in range(3):
                await run(f, rows, seed)
        f.know(g)
        await eventually(lambda: "h" not in f.lora.open_links, "it is gone")
        with pytest.raises(StepLost) as lost:
            await run(f, rows, 0)
        assert lost.value.digests == {B}
        await run(f, [rows[0], AdapterRows(2, 5, await f.resident(B))], 0)
        async with serving(f.group("h")) as h:
            h.echoes = True
            f.know(g, h)
            await f.linked("g", "h")
            await run(f, rows, 0)
        f.drop(A, B)


@every_backend
async def test_a_link_that_dies_between_submit_and_add_loses_the_step_alone(backend: str, tmp_path: Path) -> None:
    async with linked(directory_of(backend, tmp_path)) as (f, group):
        rows = [AdapterRows(0, 2, await f.lease(A))]
        await run(f, rows, 0)
        group.gate.clear()
        plan, call = begin(f.lora, rows), make_call(rows, 1, Site.QKV, 1, 3, torch.float32)
        ticket, before = submit(f.lora, plan, call), call.y.clone()
        group.end_streams()
        await eventually(lambda: len(group.closed_ends) == 1, "the link died")
        with pytest.raises(StepLost):
            await asyncio.to_thread(f.lora.add, ticket, call.y)
        f.lora.end(plan)
        assert torch.equal(call.y, before)
        again = await f.resident(A)
        assert again == rows[0].lease, "the same tenancy over another link: the same rows to an engine"
        await run(f, rows, 2)
        f.drop(A)


@every_backend
async def test_a_ticket_is_added_once_and_only_in_its_own_step(backend: str, tmp_path: Path) -> None:
    async with linked(directory_of(backend, tmp_path)) as (f, group):
        rows = [AdapterRows(0, 2, await f.lease(A))]
        plan, old = begin(f.lora, rows), make_call(rows, 1, Site.QKV, 1, 3, torch.float32)
        abandoned, untouched = submit(f.lora, plan, old), old.y.clone()
        f.lora.end(plan)
        await refuses(f.lora, abandoned, old.y)
        plan, new = begin(f.lora, rows), make_call(rows, 1, Site.QKV, 2, 3, torch.float32)
        ticket = submit(f.lora, plan, new)
        await refuses(f.lora, abandoned, old.y)
        assert torch.equal(old.y, untouched)
        await asyncio.to_thread(f.lora.add, ticket, new.y)
        await refuses(f.lora, ticket, new.y)
        assert torch.equal(new.y, new.wanted)
        f.lora.end(plan)
        assert len(group.hellos) == 1, "the link lived on"
        f.drop(A)


async def refuses(lora: RemoteLora, ticket: Ticket, y: Tensor) -> None:
    with pytest.raises(StepLost, match="its step is over, or its delta was added already"):
        await asyncio.to_thread(lora.add, ticket, y)


@every_backend
async def test_calls_of_one_site_may_be_under_way_at_once(backend: str, tmp_path: Path) -> None:
    async with linked(directory_of(backend, tmp_path)) as (f, _):
        rows = [AdapterRows(0, 20, await f.lease(A))]
        for step in range(3):
            plan = begin(f.lora, rows)
            calls = [make_call(rows, layer, Site.MOE_GATE_UP, step, 21, torch.float32) for layer in (0, 1, 1, 2)]
            tickets = [submit(f.lora, plan, call) for call in calls]
            for ticket, call in reversed(list(zip(tickets, calls, strict=True))):
                await asyncio.to_thread(f.lora.add, ticket, call.y)
            f.lora.end(plan)
            for call in calls:
                assert torch.equal(call.y, call.wanted)
        f.drop(A)


@every_backend
async def test_the_wait_of_each_site_is_told_once(backend: str, tmp_path: Path) -> None:
    async with linked(directory_of(backend, tmp_path)) as (f, _):
        rows = [AdapterRows(0, 2, await f.lease(A))]
        assert f.lora.take_waits() == {}
        started = time.monotonic()
        await run(f, rows, seed=1)
        step_s = time.monotonic() - started
        waits = f.lora.take_waits()
        assert waits.keys() == {*SITES, Site.EMBED, Site.LM_HEAD}
        assert min(waits.values()) >= 0
        assert sum(waits.values()) <= step_s
        assert f.lora.take_waits() == {}
        f.lora.drop(A)


@every_backend
async def test_a_held_answer_is_exposed_wait_of_its_site(backend: str, tmp_path: Path) -> None:
    async with linked(directory_of(backend, tmp_path)) as (f, group):
        rows = [AdapterRows(0, 2, await f.lease(A))]
        plan = begin(f.lora, rows)
        for layer, site in ((0, Site.QKV), (1, Site.O), (2, Site.O)):
            call = make_call(rows, layer, site, seed=layer, count=2, dtype=torch.float32)
            group.gate.clear()
            ticket = submit(f.lora, plan, call)
            opening = threading.Timer(0.1, group.gate.set)
            opening.start()
            await asyncio.to_thread(f.lora.add, ticket, call.y)
            opening.join()
        f.lora.end(plan)
        waits = f.lora.take_waits()
        assert waits.keys() == {Site.QKV, Site.O}
        assert 0.05 < waits[Site.QKV] < 0.9 * waits[Site.O], "two calls of one site are summed"
        f.lora.drop(A)
