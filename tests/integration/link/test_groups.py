"""What a step adds over a group of several processes is what one process would add, and each part of it once.

A base with every kind of site: routed and shared experts, router, embedding and head; adapters of some experts, with
biases, with column scales; base rows beside them. Held against the definition in float64.
"""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinilora.engine.lora.interface import AdapterRows, Routing
from infinilora.protocol.adapter import Site
from infinilora.protocol.shards import Shape
from support.every_site import (
    BASE_ROWS,
    CARDS,
    COUNTS,
    TOPK,
    Case,
    every_site,
    is_right,
    living,
    make_case,
    outputs,
    rows_of,
)
from support.lora_groups import LoraGroup, engine_of
from support.procs import NatsServer, ValkeyServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

IN_THE_SUITE = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 4)]
SHAPES = [
    pytest.param(Shape(*pair), marks=() if pair in IN_THE_SUITE else pytest.mark.soak, id="{}x{}".format(*pair))
    for pair in itertools.product((1, 2, 4), repeat=2)
]


@pytest.fixture
def started() -> Iterator[list[LoraGroup]]:
    """Groups that a test has begun; gone at its end."""
    groups: list[LoraGroup] = []
    yield groups
    for group in groups:
        group.close()


CUT = 12
"""Within the rows of the second adapter."""


async def is_right_everywhere(case: Case, group: LoraGroup, backend: str) -> None:
    """At every site of every layer; in one call a site, and in two that are under way at one time."""
    async with living() as service, engine_of((group,), service, backend=backend) as lora:
        for cut in (0, CUT):
            check(case, await every_site(lora, case, cut=cut))


def check(case: Case, seen: dict[tuple[int, Site], Tensor]) -> None:
    assert len(seen) == len(case.card.sites)
    for (layer, site), y in seen.items():
        is_right(case, layer, site, y)
        moved = float((y - outputs(site, y.shape[-1])).abs().max())
        assert moved > 1e-4, f"nothing is added at {site.label} of layer {layer}"


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_group_adds_what_the_adapters_say_at_every_site(
    shape: Shape, tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, started: list[LoraGroup]
) -> None:
    group = LoraGroup(tmp_path, CARDS["everything"], shape, nats_server, redis_server)
    started.append(group)
    group.start()
    case = make_case("everything", tmp_path, group.blobs)
    for backend in ("shm", "tcp"):
        await is_right_everywhere(case, group, backend)


@pytest.mark.parametrize("shape", [Shape(2, 2)], ids=str)
async def test_a_dense_base_is_cut_by_sites_and_layers(
    shape: Shape, tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, started: list[LoraGroup]
) -> None:
    group = LoraGroup(tmp_path, CARDS["deep"], shape, nats_server, redis_server)
    started.append(group)
    group.start()
    case = make_case("deep", tmp_path, group.blobs)
    await is_right_everywhere(case, group, "shm")


async def test_c08_tokens_whose_experts_are_all_of_one_column_and_of_both(
    tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, started: list[LoraGroup]
) -> None:
    """Case C08: experts of other columns are nowhere read, and no marker for them points to anything."""
    group = LoraGroup(tmp_path, CARDS["everything"], Shape(2, 1), nats_server, redis_server)
    started.append(group)
    group.start()
    case = make_case("everything", tmp_path, group.blobs)
    rows = sum(COUNTS) + BASE_ROWS
    choices = {"first column": (0, 2), "second column": (3, 4), "both": (4, 0), "the same twice": (2, 2)}
    async with living() as service, engine_of((group,), service) as lora:
        leases = await rows_of(lora, case)
        for pair in choices.values():
            routing = Routing(torch.tensor([pair] * rows, dtype=torch.int32), torch.rand(rows, TOPK))
            plan = lora.begin(leases)
            assert plan is not None
            for site, width in ((Site.MOE_GATE_UP, case.card.hidden_dim), (Site.MOE_DOWN, 24)):
                x = torch.randn(rows, *((TOPK, width) if site is Site.MOE_DOWN else (width,)))
                y = outputs(site, case.card.geometry()[1, site].out_dim)
                await asyncio.to_thread(lora.add, lora.submit(plan, 1, site, x, routing), y)
                is_right(case, 1, site, y, given=(x, routing))
            lora.end(plan)
        for packed in case.adapters:
            lora.drop(packed.digest)


async def test_rows_of_a_step_go_to_several_groups_of_unlike_shapes(
    tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer, started: list[LoraGroup]
) -> None:
    shapes = (Shape(2, 1), Shape(1, 2))
    groups = tuple(LoraGroup(tmp_path, CARDS["everything"], s, nats_server, redis_server) for s in shapes)
    for group in groups:
        started.append(group)
        group.start()
    case = make_case("everything", tmp_path, groups[0].blobs)
    async with living() as service, engine_of(groups, service) as lora:
        lora.place(case.placed(groups[0].name, groups[1].name))
        leases: list[AdapterRows] = await rows_of(lora, case)
        assert [row.lease.group for row in leases] == [groups[i % 2].name for i in range(4)]
        for packed in case.adapters:
            lora.drop(packed.digest)
        for cut in (0, CUT):
            check(case, await every_site(lora, case, cut=cut))
