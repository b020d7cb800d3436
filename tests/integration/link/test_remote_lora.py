"""The engine's remote back-end against scripted groups: leases, rows of several groups, links that die."""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from infinilora.engine.lora.interface import AdapterRows, Lease, LeaseStatus, Routing, StepLost
from infinilora.engine.lora.remote import RemoteLora
from infinilora.link.errors import LinkError, LinkRefused, LinkTimeout
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterFailed, AdapterNotFound
from infinilora.protocol.ids import Digest
from support.fleets import BUFFER_BYTES, CARD, Fleet, fleet
from support.groups import ScriptedGroup, delta_of, serving
from support.waiting import eventually

A, B = Digest("sha256:" + "a" * 64), Digest("sha256:" + "b" * 64)


async def step(lora: RemoteLora, rows: list[AdapterRows], site: Site = Site.QKV, layer: int = 1) -> torch.Tensor:
    """One site of one step over `rows` and one base row: what was added to zeros."""
    plan = lora.begin(rows)
    assert plan is not None
    count = plan.num_rows + 1
    x, y = (
        torch.randn(count, CARD.geometry()[layer, site].in_dim),
        torch.zeros(count, CARD.geometry()[layer, site].out_dim),
    )
    try:
        ticket = lora.submit(plan, layer, site, x)
        await asyncio.to_thread(lora.add, ticket, y)
    finally:
        lora.end(plan)
    return y


def added(lease: Lease, site: Site = Site.QKV, layer: int = 1) -> float:
    return delta_of(lease.slot, lease.slot_generation, layer, site)


def _files(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_rows_of_two_adapters_in_one_group_get_their_own_deltas(backend: str, tmp_path: Path) -> None:
    async with fleet(tmp_path if backend == "shm" else None) as f, serving(f.group("g")) as group:
        f.know(group)
        await f.linked("g")
        assert f.lora.open_links == {"g": backend}
        a, b = await f.lease(A), await f.lease(B)
        y = await step(f.lora, [AdapterRows(0, 3, a), AdapterRows(3, 2, b)])
        assert y[:, 0].tolist() == [added(a)] * 3 + [added(b)] * 2 + [0.0]
        assert (y == y[:, :1]).all()
        f.drop(A, B)
        await eventually(lambda: sorted(group.released) == [A, B], "both leases are given up")
    assert _files(tmp_path) == [], "no nonce and no ring file is left"


async def test_nothing_is_kept_of_where_a_group_was(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f:
        for _ in range(3):  # each time at another port
            async with serving(f.group("g")) as group:
                f.know(group)
                await f.linked("g")
                assert len(f.channels._channels) == 1
            await eventually(lambda: not f.lora.open_links, "the link is gone")
            f.know()
            await eventually(lambda: not f.channels._channels, "its channel is, too")


async def test_a_step_may_span_groups(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as g, serving(f.group("h")) as h:
        f.know(g, h)
        await f.linked("g", "h")
        f.lora.place({A: ("g",), B: ("h",)})
        h.generation = 7
        a, b = await f.lease(A), await f.lease(B)
        assert (a.group, b.group) == ("g", "h")
        y = await step(f.lora, [AdapterRows(0, 2, a), AdapterRows(2, 5, b)])
        assert y[:, 0].tolist() == [added(a)] * 2 + [added(b)] * 5 + [0.0]
        assert [c.header.rows for c in g.site_calls + h.site_calls] == [2, 5], "a group sees only its own rows"
        f.drop(A, B)


async def test_moe_sites_cross_in_their_shapes(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        await f.linked("g")
        a = await f.lease(A)
        plan = f.lora.begin([AdapterRows(0, 4, a)])
        assert plan is not None
        routing = Routing(torch.zeros(5, 2, dtype=torch.int32), torch.full((5, 2), 0.5))
        up, down = torch.zeros(5, 2, 48), torch.zeros(5, 32)
        await asyncio.to_thread(f.lora.add, f.lora.submit(plan, 0, Site.MOE_GATE_UP, torch.randn(5, 32), routing), up)
        await asyncio.to_thread(f.lora.add, f.lora.submit(plan, 0, Site.MOE_DOWN, torch.randn(5, 2, 24), routing), down)
        f.lora.end(plan)
        assert (up[:4] == added(a, Site.MOE_GATE_UP, 0)).all()
        assert (down[:4] == added(a, Site.MOE_DOWN, 0)).all()
        assert not up[4].any()
        assert not down[4].any()
        headers = [c.header for c in group.site_calls]
        assert [(h.in_cols, h.out_cols, h.topk) for h in headers] == [(32, 96, 2), (48, 32, 2)]
        f.drop(A)


async def test_base_steps_and_unadapted_sites_touch_no_link(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        await f.linked("g")
        assert f.lora.begin([]) is None
        a = await f.lease(A)
        plan = f.lora.begin([AdapterRows(0, 1, a)])
        assert plan is not None
        assert not plan.adapts(0, Site.ROUTER)
        assert f.lora.submit(plan, 0, Site.ROUTER, torch.zeros(1, 32)) is None
        f.lora.add(None, torch.zeros(1, 4))
        f.lora.end(plan)
        assert group.site_calls == []
        f.drop(A)


async def test_a_lease_waits_until_a_group_is_there_and_the_loop_is_told(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f:
        f.lora.want(A)
        assert f.lora.view(A).status is LeaseStatus.WAITING
        async with serving(f.group("g")) as group:
            rings = f.rings
            f.know(group)
            await f.resident(A)
            assert f.rings > rings
            f.drop(A)
            await eventually(lambda: group.released == [A], "the lease is given up")


async def test_a_stream_that_ends_loses_the_step_and_the_lease_and_both_come_back(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        a = await f.lease(A)
        group.gate.clear()
        waiting = asyncio.ensure_future(step(f.lora, [AdapterRows(0, 2, a)]))
        await eventually(lambda: len(group.site_calls) == 1, "the call is at the server")
        group.end_streams()
        with pytest.raises(StepLost) as lost:
            await waiting
        assert lost.value.digests == {A}
        group.generation = 2
        await eventually(lambda: group.asked == [A, A], "the lease is asked for again")
        again = await f.resident(A)
        assert again.slot_generation == 2
        y = await step(f.lora, [AdapterRows(0, 2, again)])
        assert y[0, 0] == added(again)
        f.drop(A)


async def test_a_plan_made_before_the_link_died_adds_nothing_after(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        a = await f.lease(A)
        group.end_streams()
        await eventually(lambda: f.lora.view(A).lease is None or len(group.asked) == 2, "the link died")
        with pytest.raises(StepLost):
            await step(f.lora, [AdapterRows(0, 2, Lease(A, "gone", a.slot, 1, a.layer_sites))])
        f.drop(A)


async def test_when_a_group_dies_its_adapters_are_asked_of_another(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("h")) as h:
        async with serving(f.group("g")) as g:
            f.know(g, h)
            await f.linked("g", "h")
            a = await f.lease(A)
            assert a.group == "g"
        f.know(h)
        await eventually(lambda: h.asked == [A], "the other group is asked")
        b = await f.resident(A)
        assert b.group == "h"
        assert (await step(f.lora, [AdapterRows(0, 1, b)]))[0, 0] == added(b)
        f.drop(A)


async def test_a_hanging_server_costs_one_deadline_and_its_pair_is_never_used_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        a = await f.lease(A)
        group.gate.clear()
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(StepLost, match="did not answer"):
            await step(f.lora, [AdapterRows(0, 2, a)])
        assert 0.9 < loop.time() - started < 4.0
        await eventually(lambda: len(group.closed_ends) == 1, "the server saw the end of the pair")
        assert group.closed_ends[0].is_quarantined
        await eventually(lambda: len(group.hellos) == 2, "a new pair is opened")
        again = await f.resident(A)
        assert (await step(f.lora, [AdapterRows(0, 2, again)]))[0, 0] == added(again)
        f.drop(A)


async def test_a_refused_call_loses_the_step_keeps_the_link_and_asks_for_the_lease_anew(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        a = await f.lease(A)
        group.refuse_calls = 1
        group.generation = 5
        with pytest.raises(StepLost, match="not granted"):
            await step(f.lora, [AdapterRows(0, 2, a)])
        await eventually(lambda: group.asked == [A, A], "the lease is told anew")
        again = await f.resident(A)
        assert again.slot_generation == 5
        assert (await step(f.lora, [AdapterRows(0, 2, again)]))[0, 0] == added(again)
        assert len(group.hellos) == 1, "the link itself lived on"
        f.drop(A)


def fail_late(f: Fleet, group: str, error: LinkError) -> None:
    """As a link whose waits only launch: what came of them its `verify` alone tells, once."""
    end = f.lora._groups._links[group].ends[0]

    def verify() -> None:
        end.verify = lambda: None  # type: ignore[method-assign]
        raise error

    end.verify = verify  # type: ignore[method-assign]


async def test_a_link_that_failed_unseen_loses_its_own_rows_and_no_others_when_the_step_is_verified(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as g, serving(f.group("h")) as h:
        f.know(g, h)
        await f.linked("g", "h")
        f.lora.place({A: ("g",), B: ("h",)})
        a, b = await f.lease(A), await f.lease(B)
        fail_late(f, "g", LinkTimeout("the LoRA server did not send message 7 in time"))
        await step(f.lora, [AdapterRows(0, 2, a), AdapterRows(2, 5, b)])
        with pytest.raises(StepLost, match="message 7") as lost:
            f.lora.verify()
        assert lost.value.digests == {A}
        f.lora.verify()
        await eventually(lambda: len(g.closed_ends) == 1, "the server saw the end of the pair")
        assert g.closed_ends[0].is_quarantined
        again = await f.resident(A)
        assert (await step(f.lora, [AdapterRows(0, 1, again), AdapterRows(1, 1, b)]))[0, 0] == added(again)
        f.lora.verify()
        assert len(h.hellos) == 1, "the other link lived on"
        f.drop(A, B)


async def test_a_call_that_was_refused_unseen_asks_for_its_leases_anew_and_keeps_the_link(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        a = await f.lease(A)
        group.generation = 5
        fail_late(f, "g", LinkRefused(AdapterFailed("this tenancy is not granted").to_wire()))
        await step(f.lora, [AdapterRows(0, 2, a)])
        with pytest.raises(StepLost, match="not granted"):
            f.lora.verify()
        await eventually(lambda: group.asked == [A, A], "the lease is told anew")
        again = await f.resident(A)
        assert again.slot_generation == 5
        assert len(group.hellos) == 1
        f.drop(A)


async def test_a_loss_that_was_told_as_it_was_waited_for_is_not_told_again(tmp_path: Path) -> None:
    """What is told again would cost whoever else is in the step then."""
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        a = await f.lease(A)
        group.refuse_calls = 1
        with pytest.raises(StepLost, match="not granted"):
            await step(f.lora, [AdapterRows(0, 2, a)])
        fail_late(f, "g", LinkTimeout("too late"))
        f.lora.verify()
        f.drop(A)


async def test_a_failure_of_the_adapter_is_final(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as g, serving(f.group("h")) as h:
        f.know(g, h)
        await f.linked("g", "h")
        g.refuse_leases = AdapterNotFound("no such adapter in the store")
        f.lora.want(A)
        await eventually(lambda: f.lora.view(A).status is LeaseStatus.FAILED, "the refusal arrives")
        error = f.lora.view(A).error
        assert isinstance(error, AdapterNotFound)
        assert "no such adapter" in error.message
        assert h.asked == []
        f.drop(A)


async def test_a_failure_of_the_group_is_tried_on_the_other(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as g, serving(f.group("h")) as h:
        f.know(g, h)
        await f.linked("g", "h")
        g.refuse_leases = AdapterFailed("disk is broken")
        assert (await f.lease(A)).group == "h"
        assert (g.asked, h.asked) == ([A], [A])
        f.drop(A)


async def test_leases_wanted_and_dropped_by_many_holders_are_asked_for_once(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        await f.linked("g")
        for _ in range(50):
            f.lora.want(A)
        await f.resident(A)
        for _ in range(49):
            f.lora.drop(A)
        assert f.lora.view(A).status is LeaseStatus.RESIDENT
        f.lora.drop(A)
        await eventually(lambda: group.released == [A], "given up once")
        assert group.asked == [A]


async def test_what_is_left_behind_is_seen(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as group:
        f.know(group)
        a = await f.lease(A)
        with pytest.raises(AssertionError, match="still held"):
            f.lora.check()
        plan = f.lora.begin([AdapterRows(0, 1, a)])
        assert plan is not None
        f.drop(A)
        with pytest.raises(AssertionError, match="never ended"):
            f.lora.check()
        f.lora.end(plan)
        f.lora.check()


async def _steps(f: Fleet, lease: Callable[[], Lease | None], count: int) -> int:
    """Run steps until `count` were right; lost ones are run again. A wrong delta fails at once."""
    right = lost = 0
    while right < count:
        held = lease()
        if held is None:
            await asyncio.sleep(0.005)
            continue
        try:
            y = await step(f.lora, [AdapterRows(0, 3, held)])
        except StepLost:
            lost += 1
            continue
        assert y[:3].flatten().tolist() == [added(held)] * y[:3].numel()
        assert math.isclose(float(y[3:].abs().sum()), 0.0)
        right += 1
    return lost


def _has_run(running: "asyncio.Future[int]", groups: list[ScriptedGroup], calls: int) -> bool:
    return running.done() or sum(len(group.site_calls) for group in groups) > calls


async def test_no_delta_is_ever_wrong_while_links_die_under_way(tmp_path: Path) -> None:
    async with fleet(tmp_path) as f, serving(f.group("g")) as g, serving(f.group("h")) as h:
        f.know(g, h)
        await f.lease(A)
        running = asyncio.ensure_future(_steps(f, lambda: f.lora.view(A).lease, 300))
        for generation in range(2, 8):
            calls = len(g.site_calls) + len(h.site_calls)
            await eventually(partial(_has_run, running, [g, h], calls + 20), "steps run")
            for group in (g, h):
                group.generation = generation
                group.end_streams()
        assert await running >= 0
        f.drop(A)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_a_link_whose_buffers_hold_no_row_of_the_base_is_not_used(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end the engine in the middle of its first step."""
    directory = tmp_path if backend == "shm" else None
    async with fleet(directory, least_buffer_bytes=BUFFER_BYTES + 1) as f, serving(f.group("g")) as group:
        f.know(group)
        f.lora.want(A)
        await eventually(lambda: "no link" in caplog.messages, "the link is refused")
        assert not f.lora.open_links
        assert f.lora.view(A).status is LeaseStatus.WAITING
        f.drop(A)
    reason = next(record.reason for record in caplog.records if record.message == "no link")  # type: ignore[attr-defined]
    assert f"hold {BUFFER_BYTES} bytes" in reason
    assert "INFINILORA_LINK_BUFFER_BYTES" in reason
