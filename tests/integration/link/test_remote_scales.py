"""Column scales over the control stream: of the right tenancy, complete before a step may use them, applied once."""

import asyncio
from pathlib import Path

import pytest
import torch

from infinilora.engine.lora.interface import AdapterRows, Lease, LeaseStatus, StepLost
from infinilora.engine.lora.remote import RemoteLora
from infinilora.protocol import lora_pb2
from infinilora.protocol.adapter import Site
from infinilora.protocol.ids import Digest
from support.fleets import CARD, Fleet, fleet
from support.groups import ScriptedGroup, delta_of, factor_of, serving
from support.waiting import eventually

A, B = Digest("sha256:" + "a" * 64), Digest("sha256:" + "b" * 64)
QKV = (1, Site.QKV)
COLUMNS = CARD.geometry()[QKV].out_dim


def scaling(f: Fleet, name: str) -> ScriptedGroup:
    """A group whose adapters all scale qkv of both layers."""
    group = f.group(name)
    group.scaled = {(0, Site.QKV): COLUMNS, QKV: COLUMNS}
    return group


def after(lease: Lease, y: float) -> float:
    return y * factor_of(lease.slot_generation, 1) + delta_of(lease.slot, lease.slot_generation, 1, Site.QKV)


async def step(lora: RemoteLora, rows: list[AdapterRows], site: Site = Site.QKV) -> torch.Tensor:
    """One site of layer 1 over `rows` and one base row: what became of fives."""
    plan = lora.begin(rows)
    assert plan is not None
    geometry = CARD.geometry()[1, site]
    y = torch.full((plan.num_rows + 1, geometry.out_dim), 5.0)
    try:
        await asyncio.to_thread(lora.add, lora.submit(plan, 1, site, torch.randn(len(y), geometry.in_dim)), y)
    finally:
        lora.end(plan)
    assert (y == y[:, :1]).all()
    return y[:, 0]


async def test_a_row_is_scaled_once_before_its_delta_is_added_and_base_rows_are_left_alone(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(scaling(f, "g")) as group:
        f.know(group)
        a, b = await f.lease(A), await f.lease(B)
        y = await step(f.lora, [AdapterRows(0, 3, a), AdapterRows(3, 2, b)])
        assert y.tolist() == [after(a, 5.0)] * 3 + [after(b, 5.0)] * 2 + [5.0]
        other = await step(f.lora, [AdapterRows(0, 3, a)], Site.O)
        assert other.tolist() == [5.0 + delta_of(a.slot, 1, 1, Site.O)] * 3 + [5.0]
        f.drop(A, B)


async def test_a_group_that_scales_beside_one_that_does_not(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(scaling(f, "g")) as g, serving(f.group("h")) as h:
        f.know(g, h)
        await f.linked("g", "h")
        f.lora.place({A: ("g",), B: ("h",)})
        a, b = await f.lease(A), await f.lease(B)
        y = await step(f.lora, [AdapterRows(0, 2, a), AdapterRows(2, 5, b)])
        assert y.tolist() == [after(a, 5.0)] * 2 + [5.0 + delta_of(b.slot, 1, 1, Site.QKV)] * 5 + [5.0]
        f.drop(A, B)


async def test_a_long_call_in_several_pieces_is_scaled_once(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(scaling(f, "g")) as group:
        f.know(group)
        a = await f.lease(A)
        rows = 2 * f.settings.buffer_bytes // (4 * COLUMNS) + 3
        y = await step(f.lora, [AdapterRows(0, rows, a)])
        assert len(group.site_calls) > 1
        assert y.tolist() == [after(a, 5.0)] * rows + [5.0]
        f.drop(A)


async def test_a_step_that_is_run_again_begins_with_a_fresh_output(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(scaling(f, "g")) as group:
        f.know(group)
        a = await f.lease(A)
        group.refuse_calls, group.generation = 1, 5
        with pytest.raises(StepLost):
            await step(f.lora, [AdapterRows(0, 2, a)])
        await eventually(lambda: group.asked == [A, A], "the lease is told anew")
        again = await f.resident(A)
        assert again.slot_generation == 5
        assert (await step(f.lora, [AdapterRows(0, 2, again)])).tolist() == [after(again, 5.0)] * 2 + [5.0]
        f.drop(A)


async def test_a_lease_that_comes_back_with_its_slot_still_brings_its_own_scales(tmp_path: Path) -> None:
    """A stale layout of the same rows, slots and generations must not keep the scales of the lease before."""
    async with fleet(tmp_path) as f, serving(scaling(f, "g")) as group:
        f.know(group)
        rows = [AdapterRows(0, 2, await f.lease(A))]
        group.forget_scales = {QKV}
        group.say(_granted(group))
        await eventually(lambda: f.lora.view(A).status is LeaseStatus.WAITING, "the lease is told anew")
        await step(f.lora, rows)
        group.forget_scales = set()
        f.drop(A)
        await eventually(lambda: group.released == [A], "given up")
        again = await f.lease(A)
        assert again.slot_generation == rows[0].lease.slot_generation
        assert again != rows[0].lease
        assert (await step(f.lora, [AdapterRows(0, 2, again)])).tolist() == [after(again, 5.0)] * 2 + [5.0]
        f.drop(A)


def _granted(group: ScriptedGroup) -> lora_pb2.ServerMessage:
    masks = {"layer_sites": group._layer_sites, "scaled_sites": group._scaled_sites()}
    return lora_pb2.ServerMessage(granted=lora_pb2.LeaseGranted(digest=A, slot=0, slot_generation=1, **masks))


def _scale(site: int, factors: bytes) -> lora_pb2.ServerMessage:
    scale = lora_pb2.ColumnScale(digest=A, slot=0, slot_generation=1, layer=1, site=site, factors=factors)
    return lora_pb2.ServerMessage(scale=scale)


async def test_when_the_group_dies_the_scales_are_those_of_the_next(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(scaling(f, "h")) as h:
        h.generation = 3
        async with serving(scaling(f, "g")) as g:
            f.know(g, h)
            await f.linked("g", "h")
            a = await f.lease(A)
            assert a.group == "g"
        f.know(h)
        await eventually(lambda: h.asked == [A], "the other group is asked")
        b = await f.resident(A)
        assert (await step(f.lora, [AdapterRows(0, 1, b)])).tolist() == [after(b, 5.0), 5.0]
        f.drop(A)


async def test_without_all_its_scales_a_layer_is_not_ready(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(scaling(f, "g")) as group:
        group.forget_scales = {QKV}
        f.know(group)
        f.lora.want(A)
        await eventually(lambda: f.lora.view(A).status is LeaseStatus.ADMISSIBLE, "layer 0 is ready")
        group.forget_scales = set()
        group.say(_scale(Site.QKV, torch.full((COLUMNS,), factor_of(1, 1)).numpy().tobytes()))
        ready = lora_pb2.LayersReady(digest=A, slot=0, slot_generation=1, count=3)
        group.say(lora_pb2.ServerMessage(layers=ready))
        a = await f.resident(A)
        assert (await step(f.lora, [AdapterRows(0, 1, a)])).tolist() == [after(a, 5.0), 5.0]
        f.drop(A)


@pytest.mark.parametrize("fault", ["another width", "a site that the lease does not name", "no such site"])
async def test_a_scale_that_does_not_fit_ends_the_link(fault: str, tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(scaling(f, "g")) as group:
        f.know(group)
        await f.lease(A)
        site = {"a site that the lease does not name": int(Site.O), "no such site": 77}.get(fault, int(Site.QKV))
        columns = 32 if site == Site.O else COLUMNS + (fault == "another width")
        group.say(_scale(site, bytes(4 * columns)))
        await eventually(lambda: len(group.hellos) == 2, "the link was ended, and another is opened")
        a = await f.resident(A)
        assert (await step(f.lora, [AdapterRows(0, 1, a)])).tolist() == [after(a, 5.0), 5.0]
        f.drop(A)


async def test_an_engine_says_that_it_scales_columns(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        await f.linked("g")
        assert group.hellos[0].scales_columns
