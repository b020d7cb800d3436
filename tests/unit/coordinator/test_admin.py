"""What operators do by hand: what it changes, what is noted of it, and who may."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from infinilora.coordinator.admin import Admin
from infinilora.coordinator.audit import Audit
from infinilora.coordinator.leader import Leadership
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.admin import (
    Act,
    AdminRequest,
    DrainMember,
    EvictAdapter,
    Freeze,
    Frozen,
    PinAdapter,
    Rebalance,
    Scale,
)
from infinilora.protocol.control import AdapterEvent, Beat, Drain, EngineLoad, Evict, Pin, Stage
from infinilora.protocol.errors import AdapterNotFound, Conflict, InfiniLoraError, InvalidRequest, Unavailable
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.protocol.scale import Desired
from support.coordinator_world import BASE, A, B, World, a_world
from support.waiting import eventually


class Desk:
    """A leader's admin, and what it was asked by whom."""

    def __init__(self, world: World, *, kept: int = 100) -> None:
        self.world = world
        self.audit = Audit(world.store, kept=kept)
        self.models = {BASE: "tiny"}
        self.admin = Admin(
            store=world.store,
            bus=world.bus,
            leadership=world.leadership,
            reconciler=world.reconciler,
            audit=self.audit,
            models=lambda: self.models,
            ceilings={"engines": 8, "groups": 2},
            follows="none",
        )

    async def do(self, act: Act, reason: str = "") -> Any:
        """What the caller reads."""
        reply = await self.admin.do(AdminRequest(act=act, who="ann", reason=reason))
        return msgspec.json.decode(msgspec.json.encode(reply.result))

    async def acts(self) -> list[tuple[int, str, int, Act, str]]:
        found = await self.audit.read(100)
        return [(n.number, n.entry.who, n.entry.epoch, n.entry.act, n.entry.reason) for n in found]

    async def record(self, name: str) -> AdapterRecord:
        found = await self.world.store.get(keys.adapter("default", name), AdapterRecord)
        assert found is not None
        return found.value


@asynccontextmanager
async def a_desk(*, kept: int = 100) -> AsyncIterator[Desk]:
    """A leader with two groups; the adapter `one` is resident on the first."""
    async with a_world() as world:
        for group in ("g1", "g2"):
            await world.obey(group)
        await world.register("one", A, 40)
        await world.leadership.step()
        await world.beat("g1", resident=(A,))
        await world.beat("g2")
        await world.reconciler.round()
        yield Desk(world, kept=kept)


async def test_a_pin_changes_the_record_and_is_told_and_noted_in_one_step() -> None:
    async with a_desk() as desk:
        events = desk.world.bus.subscribe(subjects.ADAPTER_EVENTS, AdapterEvent)
        before = await desk.world.store.counter(keys.REGISTRY_REVISION)
        done = await desk.do(PinAdapter("one"), "a launch")
        assert (done["adapter"], done["changed"], done["epoch"]) == ("default/one", True, 1)
        record = await desk.record("one")
        assert (record.pinned, record.revision) == (True, 2)
        assert (await anext(events)).revision == before + 1
        await desk.world.reconciler.round()
        assert [command.body for _, command in desk.world.commands] == [Pin(digest=A, pinned=True)]
        assert not (await desk.do(PinAdapter("default/one")))["changed"]
        assert (await desk.do(PinAdapter("one", pinned=False)))["changed"]
        assert not (await desk.record("one")).pinned
        assert await desk.acts() == [
            (3, "ann", 1, PinAdapter("one", pinned=False), ""),
            (2, "ann", 1, PinAdapter("default/one"), ""),
            (1, "ann", 1, PinAdapter("one"), "a launch"),
        ]


async def test_an_evict_reaches_the_groups_that_have_the_adapter_and_no_other() -> None:
    async with a_desk() as desk:
        done = await desk.do(EvictAdapter("one"))
        assert done["orders"] == [{"group": "g1", "digest": A, "outcome": "taken"}]
        assert (await desk.do(EvictAdapter(A, group="g2")))["orders"] == []
        assert [(group, command.body) for group, command in desk.world.commands] == [("g1", Evict(digest=A))]
        assert len(await desk.acts()) == 2


async def test_a_group_that_is_drained_by_hand_is_emptied_first_and_may_come_back() -> None:
    async with a_desk() as desk:
        world = desk.world
        assert (await desk.do(DrainMember("g1")))["changed"]
        assert not (await desk.do(DrainMember("g1")))["changed"]
        await world.reconciler.round()
        placement = await world.placement()
        assert placement is not None
        assert placement.groups == {"g2": (A,)}
        await world.beat("g1")
        await world.reconciler.round()
        assert ("g1", Drain(draining=True)) in [(group, command.body) for group, command in world.commands]
        assert (await desk.do(DrainMember("g1", draining=False)))["changed"]
        await world.beat("g1", state="draining")
        await world.reconciler.round()
        assert world.commands[-1][1].body == Drain(draining=False)


async def test_an_engine_that_is_drained_by_hand_is_told_at_once() -> None:
    async with a_desk() as desk:
        world = desk.world
        beat = Beat(kind="engine", id="e1", incarnation="x", seq=1, state="ready", load=EngineLoad())
        await world.bus.publish(subjects.heartbeat("engine", "e1"), beat)
        await eventually(lambda: "e1" in world.reconciler.engines(), "the engine is heard")
        await world.obey_as("engine", "e1")
        await desk.do(DrainMember("e1"))
        await world.reconciler.round()
        assert [(name, command.body) for name, command in world.commands] == [("e1", Drain(draining=True))]


async def test_a_drain_says_how_many_are_left_that_take_the_same_work() -> None:
    async with a_desk() as desk:
        await desk.world.beat("h1", base=Fingerprint(digest_of(b"other base")))
        assert [(await desk.do(DrainMember(group)))["others"] for group in ("g1", "g2")] == [1, 0]


async def test_what_goes_as_fewer_are_wanted_is_not_kept_by_an_undrain() -> None:
    async with a_desk() as desk:
        desired = Desired(base=BASE, model="tiny", epoch=1, engines=1, groups=1, draining=("g2",))
        await desk.world.store.put(keys.desired(BASE), desired)
        with pytest.raises(Conflict, match="`scale` says how many"):
            await desk.do(DrainMember("g2", draining=False))
        assert (await desk.do(DrainMember("g2")))["changed"]
        assert (await desk.do(DrainMember("g2", draining=False)))["changed"]
        assert desk.world.reconciler.drains.wanted == {"g2"}


async def test_a_frozen_fleet_is_left_as_it_is_until_it_thaws() -> None:
    async with a_desk() as desk:
        world = desk.world
        before = await world.placement()
        await desk.do(Freeze(), "an incident")
        await world.register("two", B)
        await world.warm(B, 9)
        await world.reconciler.round()
        assert await world.placement() == before
        assert world.commands == []
        frozen = world.reconciler.frozen
        assert frozen is not None
        assert (frozen.who, frozen.reason) == ("ann", "an incident")
        with pytest.raises(Conflict, match="ann froze the fleet"):
            await desk.do(Rebalance())
        assert (await desk.do(Freeze(frozen=False)))["changed"]
        assert await world.store.get(keys.FREEZE, Frozen) is None
        await world.reconciler.round()
        assert Stage(digest=B) in [command.body for _, command in world.commands]
        assert [act for _, _, _, act, _ in await desk.acts()] == [Freeze(frozen=False), Freeze()]


async def test_a_dry_run_says_what_would_change_and_why_and_changes_nothing() -> None:
    async with a_desk() as desk:
        world = desk.world
        await world.register("two", B, 30)
        await world.warm(A, 600)
        await desk.do(Freeze())
        await world.reconciler.round()
        before = await world.placement()
        done = await desk.do(Rebalance(dry_run=True))
        (base,) = done["bases"]
        assert (base["base"], base["model"]) == (BASE, "tiny")
        assert base["reasons"] == {"copied": 1, "placed": 1}
        moves = base["moves"]
        told = [(move["name"], move["reason"], move["before"], move["num_bytes"]) for move in moves]
        assert told == [("default/one", "copied", ["g1"], 40), ("default/two", "placed", [], 30)]
        assert moves[0]["after"] == ["g1", "g2"]
        assert base["plan"] == moves, "nothing is left as it is"
        assert base["num_bytes"] == 70
        await world.reconciler.round()
        assert await world.placement() == before
        assert len(await desk.acts()) == 1, "looking is no act"


async def test_a_fresh_plan_moves_what_a_usual_one_leaves_and_the_next_round_takes_it_up() -> None:
    async with a_world() as world:
        await world.register("one", A, 40)
        await world.register("two", B, 40)
        await world.leadership.step()
        await world.beat("g1")
        await world.reconciler.round()
        await world.beat("g2")  # comes later: nobody asks for anything, so nothing moves there by itself
        await world.reconciler.round()
        desk = Desk(world)
        usual = (await desk.do(Rebalance()))["bases"][0]
        assert (usual["reasons"], usual["moves"]) == ({"kept": 2}, [])
        told = [(home["name"], home["reason"], home["before"], home["after"]) for home in usual["plan"]]
        assert sorted(told) == [("default/one", "kept", ["g1"], ["g1"]), ("default/two", "kept", ["g1"], ["g1"])]
        fresh = (await desk.do(Rebalance(dry_run=True, fresh=True)))["bases"][0]
        (move,) = fresh["moves"]
        assert (move["digest"], move["reason"], move["before"], move["after"]) == (B, "moved", ["g1"], ["g2"])
        for asked, groups in (
            (Rebalance(), {"g1": (A, B), "g2": ()}),
            (Rebalance(fresh=True), {"g1": (A,), "g2": (B,)}),
        ):
            await desk.do(asked)
            for _ in range(2):
                await world.reconciler.round()
                placement = await world.placement()
                assert placement is not None
                assert placement.groups == groups


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (PinAdapter("nobody"), AdapterNotFound, "default/nobody"),
        (PinAdapter("a b"), InvalidRequest, "not allowed"),
        (PinAdapter("other/one"), AdapterNotFound, "other/one"),
        (EvictAdapter("sha256:12"), InvalidRequest, "not a digest"),
        (EvictAdapter("one", group="g9"), InvalidRequest, "found g1, g2"),
        (DrainMember("g9"), InvalidRequest, "groups: g1, g2; engines: none"),
        (DrainMember("g1", draining=False), InvalidRequest, "was not told to drain"),
        (Scale("shards", 1), InvalidRequest, "wanted one of engines, groups"),
        (Scale("engines", -1), InvalidRequest, "wanted 0 to 1000"),
        (Scale("engines", 1001), InvalidRequest, "wanted 0 to 1000"),
        (Scale("engines", 9), InvalidRequest, "wanted at most 8, the coordinator's max_engines, or to be forced"),
        (Scale("groups", 3), InvalidRequest, "wanted at most 2, the coordinator's max_groups, or to be forced"),
        (Scale("engines", 1001, force=True), InvalidRequest, "wanted 0 to 1000"),
        (Scale("engines", 1, model="other"), InvalidRequest, "found tiny"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_leaves_no_trace(
    act: Act, error: type[InfiniLoraError], words: str
) -> None:
    async with a_desk() as desk:
        with pytest.raises(error, match=words):
            await desk.do(act)
        assert await desk.acts() == []
        assert desk.world.commands == []


async def test_counts_by_hand_are_kept_beside_each_other_until_they_are_given_up() -> None:
    async with a_desk() as desk:

        async def counts() -> dict[str, int] | None:
            found = await desk.world.store.get(keys.SCALE, dict[str, int])
            return found.value if found else None

        done = await desk.do(Scale("engines", 3))
        assert (done["tier"], done["model"], done["count"], done["changed"]) == ("engines", "tiny", 3, True)
        assert not (await desk.do(Scale("engines", 3, model="tiny")))["changed"]
        desk.models = {BASE: "tiny", Fingerprint(digest_of(b"other base")): "large"}
        await desk.do(Scale("groups", 0, model="large"))
        assert await counts() == {"engines:tiny": 3, "groups:large": 0}
        with pytest.raises(InvalidRequest, match="found large, tiny"):
            await desk.do(Scale("engines", 1))
        await desk.do(Scale("engines", None, model="tiny"))
        assert await counts() == {"groups:large": 0}
        assert len(await desk.acts()) == 4


async def test_a_count_that_nobody_carries_out_is_told_as_that() -> None:
    async with a_desk() as desk:
        done = await desk.do(Scale("engines", 3))
        assert (done["follows"], done["frozen"]) == ("none", False)
        await desk.do(Freeze())
        assert (await desk.do(Scale("engines", 2)))["frozen"]


async def test_more_than_the_ceiling_is_had_where_it_is_forced_and_the_audit_says_so() -> None:
    async with a_desk() as desk:
        assert (await desk.do(Scale("engines", 9, force=True)))["changed"]
        found = await desk.world.store.get(keys.SCALE, dict[str, int])
        assert found is not None
        assert found.value == {"engines:tiny": 9}
        assert [act for _, _, _, act, _ in await desk.acts()] == [Scale("engines", 9, force=True)]


async def test_a_deposed_leader_changes_nothing_and_notes_nothing() -> None:
    async with a_desk() as desk:
        world = desk.world
        await world.store.release_lease(keys.LEADER, "c1/a", 1)
        await Leadership(world.store, "c2/b", lease_s=30).step()
        for act in (
            PinAdapter("one"),
            DrainMember("g1"),
            Freeze(),
            EvictAdapter("one"),
            Rebalance(),
            Scale("engines", 2),
        ):
            with pytest.raises(Unavailable, match="another coordinator leads"):
                await desk.do(act)
        assert not (await desk.record("one")).pinned
        assert await world.store.get(keys.FREEZE, Frozen) is None
        assert await world.store.get(keys.DRAINS, list[str]) is None
        assert await world.store.get(keys.SCALE, dict[str, int]) is None
        assert world.commands == []
        assert await desk.acts() == []


async def test_a_standby_has_the_leader_do_it_and_says_so_when_nobody_leads() -> None:
    async with a_desk() as desk:
        world = desk.world
        standby = Leadership(world.store, "c2/b", lease_s=30)
        other = Admin(
            store=world.store,
            bus=world.bus,
            leadership=standby,
            reconciler=world.reconciler,
            audit=desk.audit,
            models=dict,
            ceilings={},
            follows="none",
        )
        request = AdminRequest(act=Freeze(), who="bob")
        with pytest.raises(Unavailable, match="no coordinator leads"):
            await other.do(request)
        await standby.step()
        with pytest.raises(Unavailable):
            await other.do(request)
        await world.bus.serve(subjects.admin("c1"), AdminRequest, desk.admin.obey)
        assert (await other.do(request)).result["epoch"] == 1
        assert [(who, act) for _, who, _, act, _ in await desk.acts()] == [("bob", Freeze())]


async def test_the_audit_is_paged_and_the_oldest_leave_it() -> None:
    async with a_desk(kept=5) as desk:
        for number in range(8):
            await desk.do(Freeze(frozen=number % 2 == 0), str(number))
        assert [n.number for n in await desk.audit.read(100)] == [8, 7, 6, 5, 4]
        assert [n.number for n in await desk.audit.read(2)] == [8, 7]
        assert [n.number for n in await desk.audit.read(2, 7)] == [6, 5]
        assert [n.number for n in await desk.audit.read(2, 5)] == [4]
        assert [n.entry.reason for n in await desk.audit.read(1)] == ["7"]
