"""Rounds of the leader over memory twins: what is written, what is asked, and when nothing is."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from infinilora.coordinator.basis import PLAN_SHARE
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.placement import Plan
from infinilora.coordinator.reconcile import Foreseen, Reconciler
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.control import (
    Death,
    Drain,
    Evict,
    Pin,
    Placement,
    PlacementChange,
    PlacementHead,
    PlacementPart,
    ProcessState,
    Stage,
)
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.runtime.memory import MemoryBus
from infinilora.runtime.store import Change
from support.coordinator_world import BASE, INTERVAL_S, POLICY, A, B, C, World, a_world
from support.registered import stamp
from support.waiting import eventually

OTHER = Fingerprint(digest_of(b"other base"))


class InterruptedBus(MemoryBus):
    """Does something of the test's once a placement has been announced: in the middle of a round."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    @override
    async def publish(self, subject: str, event: msgspec.Struct) -> None:
        await super().publish(subject, event)
        if subject == subjects.PLACEMENT_EVENTS and self.meanwhile is not None:
            await self.meanwhile()


async def test_the_leader_writes_and_tells_what_should_be_where() -> None:
    async with a_world() as world:
        told = world.bus.subscribe(subjects.PLACEMENT_EVENTS, PlacementChange)
        await world.register("one", A)
        await world.register("two", B)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        written = await world.placement()
        assert written == Placement(base=BASE, epoch=1, revision=1, groups={"g1": tuple(sorted((A, B)))})
        assert await anext(told) == PlacementChange(
            base=BASE, epoch=1, revision=1, before=0, added={"g1": tuple(sorted((A, B)))}
        )
        await world.beat("g1")
        await world.reconciler.round()
        assert await world.placement() == written
        assert told.pop_all() == []


async def test_a_new_adapter_and_a_removed_one_change_the_placement() -> None:
    async with a_world() as world:
        await world.register("one", A)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        await world.register("two", B)
        await world.beat("g1")
        await world.reconciler.round()
        record = await world.store.get(keys.adapter("default", "one"), AdapterRecord)
        assert record is not None
        key = keys.adapter("default", "one")
        assert await world.store.swap([Change(key, record.raw, None)], also=[stamp("one")])
        await world.beat("g1")
        await world.reconciler.round()
        placement = await world.placement()
        assert placement is not None
        assert (placement.revision, placement.groups) == (3, {"g1": (B,)})


async def test_a_group_that_beats_a_lower_speed_is_given_less_of_the_load() -> None:
    async with a_world() as world:
        hot = [digest_of(b"hot%d" % number) for number in range(10)]
        for number, digest in enumerate(hot):
            await world.register(f"hot{number}", digest)
            await world.warm(digest, 5)
        await world.leadership.step()
        await world.beat("g1", rows_per_s=1000.0)
        await world.beat("g2", rows_per_s=4000.0)
        await world.reconciler.round()
        placement = await world.placement()
        assert placement is not None
        assert {group: len(held) for group, held in placement.groups.items()} == {"g1": 2, "g2": 8}


async def test_a_standby_looks_and_writes_nothing() -> None:
    async with a_world() as world:
        await world.register("one", A)
        await Leadership(world.store, "other/b", lease_s=30).step()
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        assert await world.placement() is None
        assert len(world.reconciler.registry) == 1


async def test_what_has_heat_and_is_nowhere_is_staged_once() -> None:
    async with a_world() as world:
        await world.obey("g1")
        await world.register("one", A)
        await world.register("two", B)
        await world.warm(A, 3)
        await world.leadership.step()
        for _ in range(3):
            await world.beat("g1")
            await world.reconciler.round()
        assert [(group, command.body, command.epoch) for group, command in world.commands] == [
            ("g1", Stage(digest=A), 1)
        ]


HALVES = replace(POLICY, heat_half_lives_s=(10, 600), max_hints=1)


async def test_what_is_asked_for_now_is_staged_before_what_was_asked_for_more_in_the_long_run() -> None:
    async with a_world(policy=HALVES) as world:
        await world.obey("g1")
        await world.register("one", A)
        await world.register("two", B)
        await world.warm(A, 300, age_s=600)
        await world.warm(B, 3)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        assert [command.body for _, command in world.commands] == [Stage(digest=B)]


async def test_room_is_for_what_is_asked_for_in_the_long_run() -> None:
    """A few requests now make an adapter no hotter than one that has hundreds behind it."""
    async with a_world(policy=HALVES) as world:
        await world.register("one", A)
        await world.register("two", B)
        await world.warm(A, 300, age_s=600)
        await world.warm(B, 3)
        await world.leadership.step()
        await world.beat("g1", total=10)
        await world.reconciler.round()
        found = await world.placement()
        assert found is not None
        assert found.groups == {"g1": (A,)}


async def test_what_rises_is_a_hot_spot_before_the_long_run_knows_it() -> None:
    async with a_world(policy=HALVES) as world:
        await world.register("one", A)
        await world.warm(A, 60)  # 4 requests a second of the latest ten seconds, 0.07 of ten minutes
        await world.leadership.step()
        for group in ("g1", "g2", "g3"):
            await world.beat(group)
        await world.reconciler.round()
        found = await world.placement()
        assert found is not None
        assert found.groups == {"g1": (A,), "g2": (A,), "g3": (A,)}


PLAN_S = 1e-4
"""Short against a beat: nobody is dead after it."""


class Planner(Reconciler):
    """Takes so long for each plan, and counts them."""

    num_plans = 0

    @override
    async def _place(self, *args: Any) -> Plan:
        self.num_plans += 1
        self._clock.now += PLAN_S  # type: ignore[attr-defined]  # the world's
        return await super()._place(*args)


async def plans_of(world: World) -> int:
    assert isinstance(world.reconciler, Planner)
    before = world.reconciler.num_plans
    await world.beat("g1")
    await world.reconciler.round()
    return world.reconciler.num_plans - before


async def test_a_plan_is_made_again_when_something_has_changed_and_follows_rates_after_a_while() -> None:
    async with a_world(kind=Planner) as world:
        await world.register("one", A)
        await world.warm(A, 1)
        await world.leadership.step()
        assert [await plans_of(world) for _ in range(3)] == [1, 0, 0]
        await world.warm(A, 1)
        assert await plans_of(world) == 0
        world.clock.now += PLAN_S / PLAN_SHARE
        assert [await plans_of(world), await plans_of(world)] == [1, 0]
        await world.register("two", B)
        assert await plans_of(world) == 1
        world.reconciler.look_again()
        assert await plans_of(world) == 1
        world.reconciler.look_again(afresh=True)
        assert await plans_of(world) == 1
        await world.warm(B, 300)  # hot enough for a second copy
        assert await plans_of(world) == 1


async def test_a_server_that_does_not_answer_is_not_asked_on_and_on() -> None:
    async with a_world() as world:
        tried = world.reconciler.metrics.commands.labels(body="stage", outcome="unavailable")._value
        for name, digest in (("one", A), ("two", B), ("three", C)):
            await world.register(name, digest)
        await world.warm(A, 3)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        assert tried.get() == 1
        await world.warm(B, 3)
        await world.beat("g1")
        await world.reconciler.round()
        assert tried.get() == 1
        await world.obey("g1")
        await world.beat("g1", incarnation="y")
        await world.reconciler.round()
        assert [command.body for _, command in world.commands] == [Stage(digest=B)]


async def of_two_bases(world: World, *, rounds: int) -> list[tuple[str, object]]:
    """What the groups `g1` and `h1` are told, that never get what they are asked to stage."""
    for group in ("g1", "h1"):
        await world.obey(group)
    await world.register("one", A)
    await world.register("two", B)
    await world.register("other", C, base=OTHER)
    for digest, requests in ((A, 3), (B, 2), (C, 3)):
        await world.warm(digest, requests)
    await world.leadership.step()
    for _ in range(rounds):
        await world.beat("g1")
        await world.beat("h1", base=OTHER)
        await world.reconciler.round()
    return [(group, command.body) for name in ("g1", "h1") for group, command in world.commands if group == name]


async def test_a_group_is_asked_for_so_many_at_a_time_whatever_other_bases_there_are() -> None:
    async with a_world(policy=replace(POLICY, max_hints=1)) as world:
        assert await of_two_bases(world, rounds=3) == [("g1", Stage(digest=A)), ("h1", Stage(digest=C))]


async def test_a_group_that_has_failed_at_an_adapter_is_left_alone_whatever_other_bases_there_are() -> None:
    async with a_world(policy=replace(POLICY, move_s=0, hint_pause_s=0, max_hints=1)) as world:
        told = await of_two_bases(world, rounds=2)
        assert told == [("g1", Stage(digest=A)), ("g1", Stage(digest=B)), ("h1", Stage(digest=C))]


async def test_pins_are_not_told_one_by_one_to_a_server_that_does_not_answer() -> None:
    async with a_world() as world:
        tried = world.reconciler.metrics.commands.labels(body="pin", outcome="unavailable")._value
        for name, digest in (("one", A), ("two", B), ("three", C)):
            await world.register(name, digest, pinned=True)
        await world.leadership.step()
        for _ in range(2):
            await world.beat("g1", resident=(A, B, C))
            await world.reconciler.round()
        assert tried.get() == 1
        await world.obey("g1")
        await world.beat("g1", resident=(A, B, C), incarnation="y")
        await world.reconciler.round()
        assert [command.body for _, command in world.commands] == [Pin(digest=d, pinned=True) for d in (A, B, C)]


async def test_what_was_staged_before_makes_room_for_a_hotter_ones_copy() -> None:
    """A group keeps for itself what it was once asked to stage: it is told what is not wanted there any more."""
    async with a_world() as world:
        for group in ("g1", "g2"):
            await world.obey(group)
        await world.register("hot", A, num_bytes=60)
        await world.register("cold", B, num_bytes=60)
        await world.warm(A, 500)
        await world.leadership.step()
        await world.beat("g1", free=40, resident=(A,))
        await world.beat("g2", free=40, resident=(B,))
        await world.reconciler.round()
        assert [(name, c.body) for name, c in world.commands] == [("g2", Stage(digest=A, over=(B,)))]


async def test_what_is_expected_is_planned_and_staged_over_what_nobody_asks_for_and_its_use_is_counted() -> None:
    async with a_world() as world:
        used = world.reconciler.metrics.prefetched.labels(outcome="used")._value
        world.reconciler.foreseen = Foreseen(expected=lambda: {B: 0.01}, bytes_per_s=1000)
        await world.obey("g1")
        await world.register("idle", A, num_bytes=60)
        await world.register("daily", B, num_bytes=60)
        await world.leadership.step()
        await world.beat("g1", free=40, resident=(A,))
        await world.reconciler.round()
        assert [command.body for _, command in world.commands] == [Stage(digest=B, over=(A,))]
        placement = await world.placement()
        assert placement is not None
        assert placement.groups == {"g1": (B,)}
        for _ in range(2):
            await world.beat("g1", free=40, resident=(B,))
            await world.reconciler.round()
        assert used.get() == 0
        await world.warm(B, 3)
        await world.beat("g1", free=40, resident=(B,))
        await world.reconciler.round()
        assert used.get() == 1
        assert len(world.commands) == 1


async def test_a_pinned_adapter_is_staged_without_heat() -> None:
    async with a_world() as world:
        await world.obey("g1")
        await world.register("one", A)
        await world.register("two", B, pinned=True)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        assert [command.body for _, command in world.commands] == [Stage(digest=B), Pin(digest=B, pinned=True)]


async def test_a_pin_is_told_once_to_each_life_of_a_server_and_taken_back() -> None:
    async with a_world() as world:
        await world.obey("g1")
        await world.register("two", B, pinned=True)
        await world.leadership.step()
        for incarnation in ("x", "x", "y"):
            await world.beat("g1", resident=(B,), incarnation=incarnation)
            await world.reconciler.round()
        assert [command.body for _, command in world.commands] == [Pin(digest=B, pinned=True)] * 2
        found = await world.store.get(keys.adapter("default", "two"), AdapterRecord)
        assert found is not None
        unpinned = msgspec.structs.replace(found.value, pinned=False)
        await world.store.swap([Change(keys.adapter("default", "two"), found.raw, unpinned)], also=[stamp("two")])
        for _ in range(2):
            await world.beat("g1", resident=(B,), incarnation="y")
            await world.reconciler.round()
        assert [command.body for _, command in world.commands[2:]] == [Pin(digest=B, pinned=False)]


async def test_what_an_earlier_leader_had_pinned_and_nobody_wants_pinned_any_more_is_let_go() -> None:
    async with a_world() as world:
        await world.obey("g1")
        await world.register("one", A, pinned=True)
        await world.register("two", B)
        await world.leadership.step()
        for _ in range(2):
            await world.beat("g1", resident=(A, B), pinned=(A, B, C))
            await world.reconciler.round()
        assert [command.body for _, command in world.commands] == [Pin(digest=d, pinned=False) for d in (B, C)]


async def test_who_leads_again_remembers_nothing_of_what_it_told_when_it_led_before() -> None:
    """Another leader has taken all of it back meanwhile, and nobody wants that any more."""
    async with a_world() as world:
        await world.obey("g1")
        await world.obey("g2")
        await world.register("one", A, pinned=True)
        await world.leadership.step()
        await world.store.put(keys.DRAINS, ["g2"])
        first = [("g1", Stage(digest=A)), ("g1", Pin(digest=A, pinned=True)), ("g2", Drain(draining=True))]

        async def lead() -> list[tuple[str, object]]:
            world.commands.clear()
            for _ in range(2):
                await world.beat("g1")
                await world.beat("g2")
                await world.reconciler.round()
            return [(group, command.body) for group, command in world.commands]

        assert await lead() == first
        await world.leadership.resign()
        other = Leadership(world.store, "c2/b", lease_s=30)
        await other.step()
        await world.leadership.step()
        assert await lead() == []
        await other.resign()
        await world.leadership.step()
        assert await lead() == first


async def test_what_is_resident_is_not_asked_for_and_what_is_unknown_is_evicted() -> None:
    async with a_world() as world:
        await world.obey("g1")
        await world.register("one", A)
        await world.warm(A, 3)
        await world.leadership.step()
        await world.beat("g1", resident=(A, C))
        await world.reconciler.round()
        assert [command.body for _, command in world.commands] == [Evict(digest=C)]


async def test_a_deposed_leader_resigns_when_it_is_told() -> None:
    async with a_world() as world:
        await world.obey("g1", seen_epoch=7)
        await world.register("one", A)
        await world.warm(A, 3)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        assert not world.leadership.is_leading
        assert world.commands == []


async def test_a_leader_deposed_in_the_middle_of_a_round_never_speaks_with_its_successors_epoch() -> None:
    bus = InterruptedBus()
    async with a_world(bus) as world:

        async def depose() -> None:
            assert await world.store.release_lease(keys.LEADER, "c1/a", 1)
            await Leadership(world.store, "c2/b", lease_s=30).step()
            await world.leadership.step()

        bus.meanwhile = depose
        await world.obey("g1")
        await world.register("one", A)
        await world.warm(A, 3)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        assert (world.leadership.is_leading, world.leadership.epoch) == (False, 2)
        assert [command.epoch for _, command in world.commands] == [1]


async def test_a_placement_of_a_higher_epoch_is_not_overwritten() -> None:
    async with a_world() as world:
        theirs = PlacementHead(base=BASE, epoch=9, revision=40, parts={"g1": 40})
        await world.store.put(keys.placement(BASE), theirs)
        await world.store.put(keys.placement_part(BASE, "g1"), PlacementPart(revision=40, digests=()))
        await world.register("one", A)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        assert await world.placement() == Placement(base=BASE, epoch=9, revision=40, groups={"g1": ()})
        assert not world.leadership.is_leading


async def test_a_leader_that_was_stopped_before_its_first_write_writes_nothing_when_another_has_led() -> None:
    """Its lease is over in the store and not by its own clock: only the script that writes can know."""
    async with a_world() as world:
        await world.register("one", A)
        await world.leadership.step()
        await world.beat("g1")
        assert await world.store.release_lease(keys.LEADER, "c1/a", 1)
        await Leadership(world.store, "c2/b", lease_s=30).step()
        assert world.leadership.holding == 1
        await world.reconciler.round()
        assert await world.placement() is None


async def test_a_death_that_no_leader_said_is_said_by_the_next_and_once() -> None:
    async with a_world() as world:
        deaths = world.bus.subscribe(subjects.DEATHS, Death)
        await world.beat("g1")
        for _ in range(8):  # four beats
            world.clock.now += INTERVAL_S / 2
            await world.beat("g2")
        await eventually(lambda: [m.health for m in world.members.all()] == ["dead", "alive"], "one is dead")
        await world.reconciler.round()
        assert deaths.pop_all() == [], "who stands by says nothing"
        await world.leadership.step()
        for _ in range(2):
            await world.beat("g2")
            await world.reconciler.round()
        assert deaths.pop_all() == [Death(kind="lora-server", id="g1-0", incarnation="x", epoch=1)]


@pytest.mark.parametrize(("state", "missed"), [("ready", 1), ("draining", 0)])
async def test_a_group_that_went_as_it_was_told_to_is_no_loss(state: ProcessState, missed: int) -> None:
    """Of a base that is left without groups, what was hot is nowhere on purpose."""
    async with a_world() as world:
        await world.register("one", A)
        await world.warm(A, 3)
        await world.leadership.step()
        await world.beat("g1", resident=(A,), state=state)
        await world.reconciler.round()
        world.members.bury(Death(kind="lora-server", id="g1-0", incarnation="x", epoch=1))
        await world.reconciler.round()
        assert world.reconciler.metrics.missed._value.get() == missed


async def test_an_adapter_moves_only_after_its_new_group_has_it() -> None:
    async with a_world() as world:
        for group in ("g1", "g2"):
            await world.obey(group)
        await world.register("one", A, 40)
        await world.warm(A, 3)
        await world.leadership.step()
        await world.beat("g1", resident=(A,))
        await world.reconciler.round()
        await world.store.put(keys.DRAINS, ["g1"])
        steps = []
        for resident in ((), (A,), (A,)):
            await world.beat("g1", resident=(A,))
            await world.beat("g2", resident=resident)
            await world.reconciler.round()
            placement = await world.placement()
            assert placement is not None
            steps.append(placement.groups)
        assert steps == [{"g1": (A,), "g2": (A,)}, {"g2": (A,)}, {"g2": (A,)}]
        assert [(group, command.body) for group, command in world.commands] == [
            ("g2", Stage(digest=A)),
            ("g1", Drain(draining=True)),
        ]


async def test_a_group_that_is_to_stay_after_all_is_told_to_take_work_again() -> None:
    async with a_world() as world:
        await world.obey("g1")
        await world.register("one", A)
        await world.leadership.step()
        await world.beat("g1", state="draining")
        await world.reconciler.round()
        await world.reconciler.round()
        assert [command.body for _, command in world.commands] == [Drain(draining=False)]


async def test_nothing_is_decided_while_the_store_is_away() -> None:
    async with a_world() as world:
        await world.register("one", A)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        world.store.is_connected = False
        await world.reconciler.round()
        assert not world.reconciler.store_answers
        world.store.is_connected = True
        await world.beat("g1")
        await world.reconciler.round()
        assert world.reconciler.store_answers
        placement = await world.placement()
        assert placement is not None
        assert placement.revision == 1


async def test_a_fact_that_cannot_be_read_stops_the_round_and_not_the_process() -> None:
    async with a_world() as world:
        await world.store.put(keys.placement(BASE), {"not": "a placement"})
        await world.register("one", A)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        assert not world.reconciler.looked.is_set()
        assert world.leadership.is_leading


async def test_nothing_is_decided_while_the_bus_is_away() -> None:
    async with a_world() as world:
        await world.register("one", A)
        await world.leadership.step()
        await world.beat("g1")
        world.bus.set_connected(False)
        await world.reconciler.round()
        assert await world.placement() is None


async def test_a_change_of_the_fleet_wakes_the_leader() -> None:
    async with a_world() as world:
        await world.register("one", A)
        await world.leadership.step()
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(world.reconciler.run()), loop.create_task(world.reconciler.follow_members())]
        await world.beat("g1")

        async def is_placed() -> bool:
            await world.beat("g1")
            return await world.placement() is not None

        await eventually(is_placed, "the new group is given its adapter")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinilora.coordinator.reconcile.QUIET_S", 0.0)
