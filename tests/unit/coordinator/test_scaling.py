"""Rounds of scaling over memory twins: what is written, who is drained, when nothing is decided."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from infinilora.coordinator.ahead import _sizing
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.reconcile import Policy, Reconciler
from infinilora.coordinator.scale import Bounds
from infinilora.coordinator.scaling import Autoscaler, Sizing
from infinilora.coordinator.settings import Settings
from infinilora.coordinator.slo import Alarms
from infinilora.coordinator.traffic import Watched
from infinilora.protocol import keys, subjects
from infinilora.protocol.control import (
    Beat,
    Command,
    CommandReply,
    Death,
    Drain,
    EngineLoad,
    GroupLoad,
    ProcessKind,
    ProcessState,
)
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.protocol.scale import TIERS, Desired, TierName
from infinilora.protocol.traffic import DemandHistory, Traffic
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.members import Members
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.metrics import CoordinatorMetrics, new_registry
from support.waiting import eventually

BASE = Fingerprint(digest_of(b"base"))
INTERVAL_S, LEAD_S, HOLD_S, IDLE_S = 0.04, 60.0, 300.0, 900.0
POLICY = Policy(60, (60,), 2.0, 1.0, 4, 60, 30, 5, 0)


class Told:
    """Notes what it is told."""

    def __init__(self, **present: int) -> None:
        self.counts: list[tuple[int, int]] = []
        self.leads: Callable[[], bool] | None = None
        self.is_away = False
        self._present: dict[TierName, int] = {tier: present[tier] for tier in TIERS if tier in present}

    async def apply(self, desired: Desired, leads: Callable[[], bool]) -> None:
        if self.is_away:
            raise Unavailable("away")
        self.counts.append((desired.engines, desired.groups))
        self.leads = leads

    async def present(self, desired: Desired) -> dict[TierName, int]:
        if self.is_away:
            raise Unavailable("away")
        return self._present


class World:
    """One coordinator's scaler, engines and groups that beat, and a clock of its own."""

    def __init__(self, bus: MemoryBus, members: Members, home: Path, backend: Told | None, least: int) -> None:
        self.now = 0.0
        self.store = store = MemoryStore()
        self.bus, self.members = bus, members
        self.leadership = Leadership(store, "c1/a", lease_s=60)
        self.reconciler = Reconciler(
            store=store,
            bus=bus,
            members=members,
            leadership=self.leadership,
            metrics=CoordinatorMetrics(new_registry()),
            policy=POLICY,
            blobs=DirectoryBlobs(home),
        )
        watched = Watched(bus, members, lead_s=LEAD_S, season_s=86_400, clock=lambda: self.now, wall=lambda: self.now)
        self.watched, self.alarms = watched, Alarms()
        bounds = Bounds(least, 4, HOLD_S, LEAD_S)
        self.scaler = Autoscaler(
            store=store,
            members=members,
            leadership=self.leadership,
            reconciler=self.reconciler,
            watched=watched,
            sizing=Sizing({"engines": bounds, "groups": bounds}, 10, 100, IDLE_S, 0.95, 0.9),
            backend=backend,
            alarms=self.alarms,
        )
        self.commands: list[tuple[str, bool]] = []
        self.arrivals = 0
        self._seq = 0

    async def engine(self, number: int, *, running: int = 0, state: ProcessState = "ready") -> None:
        await self._beat("engine", f"engine-{number}", EngineLoad(running=running), state)

    async def group(self, number: int, *, leases: int = 0, state: ProcessState = "ready") -> None:
        load = GroupLoad(bytes_free=100, bytes_total=100, leases=leases)
        await self._beat("lora-server", f"lora-{number}", load, state)

    async def _beat(self, kind: ProcessKind, name: str, load: EngineLoad | GroupLoad, state: ProcessState) -> None:
        self._seq += 1
        group = name if kind == "lora-server" else ""
        beat = Beat(
            kind=kind,
            id=name,
            incarnation="x",
            seq=self._seq,
            state=state,
            base=BASE,
            model="m",
            group=group,
            load=load,
        )

        async def obey(command: Command) -> CommandReply:
            if isinstance(command.body, Drain):
                self.commands.append((name, command.body.draining))
            return CommandReply(command_id=command.command_id)

        await self.bus.serve(subjects.commands(beat.kind, name), Command, obey)
        await self.bus.publish(subjects.heartbeat(beat.kind, name), beat)

        def heard() -> bool:
            member = self.members.get(beat.kind, name)
            return member is not None and member.beat.seq == beat.seq

        await eventually(heard, "the beat is heard")

    def came(self, count: int) -> None:
        self.arrivals += count
        self.watched.hear(Traffic(gateway="g", incarnation="i", arrivals={BASE: self.arrivals}))

    async def round(self, seconds: float = 1.0) -> Desired | None:
        """Time goes on, both rounds are made."""
        self.now += seconds
        await self.reconciler.round()
        await self.scaler.round()
        found = await self.store.get(keys.desired(BASE), Desired)
        return found.value if found else None

    async def asleep(self) -> dict[str, str]:
        found = await self.store.get(keys.ASLEEP, dict[str, str])
        return found.value if found else {}

    async def counts(self, seconds: float = 1.0) -> tuple[int, int]:
        desired = await self.round(seconds)
        assert desired is not None
        return desired.engines, desired.groups


@asynccontextmanager
async def a_world(tmp_path: Path, backend: Told | None, *, least: int = 1) -> AsyncIterator[World]:
    """Time stands still for the members: nobody is missed."""
    bus, now = MemoryBus(), 0.0
    async with bus, Members(bus, interval_s=INTERVAL_S, clock=lambda: now) as members:
        now = 2 * INTERVAL_S  # thawed
        world = World(bus, members, tmp_path, backend, least)
        world.came(0)
        await world.leadership.step()
        yield world


async def test_what_is_there_is_what_should_be_until_something_is_decided(tmp_path: Path) -> None:
    backend = Told()
    async with a_world(tmp_path, backend) as world:
        assert await world.round() is None
        for number in range(2):
            await world.engine(number, running=9)
        await world.group(0)
        assert await world.counts() == (2, 1)
        assert backend.counts == [(2, 1)]


async def test_replicas_that_are_still_to_come_are_counted(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told(engines=3)) as world:
        await world.engine(0)
        assert await world.counts() == (3, 1)


async def test_nothing_is_decided_before_the_cluster_has_said_what_is_there(tmp_path: Path) -> None:
    backend = Told(engines=3)
    async with a_world(tmp_path, backend) as world:
        await world.engine(0)
        backend.is_away = True
        assert await world.round() is None


async def test_more_sequences_bring_more_engines(tmp_path: Path) -> None:
    backend = Told()
    async with a_world(tmp_path, backend) as world:
        await world.engine(0)
        await world.counts()
        await world.engine(0, running=22)
        for _ in range(12):
            world.came(25)
            await world.round(10)
        assert await world.counts() == (3, 1)
        assert backend.counts[-1] == (3, 1)


def test_headroom_is_what_counts_are_not_planned_with() -> None:
    where = {"nats_url": "nats://127.0.0.1:1", "redis_url": "redis://127.0.0.1:1", "store_url": "file:///nowhere"}
    settings = Settings(**where, engine_sequences=32, group_sequences=200, scale_utilisation=0.75)  # type: ignore[arg-type]
    sizing = _sizing(settings)
    assert (sizing.engine_sequences, sizing.group_sequences) == (24, 150)


async def test_one_that_is_to_go_drains_first_and_what_drained_is_forgotten_when_it_is_gone(tmp_path: Path) -> None:
    backend = Told()
    async with a_world(tmp_path, backend) as world:
        for number in range(2):
            await world.engine(number, running=1)
        await world.group(0)
        await world.counts()
        desired = await world.round(HOLD_S + 1)
        assert (desired.engines, desired.draining) == (2, ("engine-1",))  # type: ignore[union-attr]
        await world.round()
        assert world.commands == [("engine-1", True)]
        await world.engine(1, running=1, state="draining")
        assert await world.counts() == (2, 1)
        await world.engine(1, running=0, state="draining")
        assert await world.counts() == (1, 1)
        assert backend.counts[-1] == (1, 1)
        world.members.bury(Death(kind="engine", id="engine-1", incarnation="x", epoch=1))
        desired = await world.round()
        assert desired is not None
        assert desired.draining == ()
        await world.round()
        assert world.reconciler.drains.wanted == frozenset()


async def test_one_that_drains_and_is_wanted_again_stays(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told()) as world:
        for number in range(2):
            await world.engine(number, running=1)
        await world.counts()
        await world.round(HOLD_S + 1)
        await world.round()
        await world.engine(0, running=30)
        await world.engine(1, running=1, state="draining")
        for _ in range(12):
            world.came(30)
            await world.round(10)
        assert (await world.counts())[0] >= 2
        assert world.commands == [("engine-1", True), ("engine-1", False)]
        assert world.reconciler.drains.wanted == frozenset()


async def test_what_an_operator_drains_stays_so_though_the_scaler_wanted_it_to_go_and_wants_it_back(
    tmp_path: Path,
) -> None:
    async with a_world(tmp_path, Told()) as world:
        for number in range(2):
            await world.engine(number, running=1)
        await world.counts()
        await world.store.put(keys.DRAINS, ["engine-1"])
        desired = await world.round(HOLD_S + 1)
        assert desired is not None
        assert desired.draining == ("engine-1",)
        await world.engine(0, running=30)
        await world.engine(1, running=1, state="draining")
        for _ in range(12):
            world.came(30)
            desired = await world.round(10)
        assert desired is not None
        assert desired.draining == ()
        assert world.commands == [("engine-1", True)]
        assert world.reconciler.drains.wanted == {"engine-1"}


async def test_what_an_operator_drains_is_not_undone(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told()) as world:
        await world.engine(0)
        await world.round()
        await world.store.put(keys.DRAINS, ["engine-0"])
        for _ in range(3):
            await world.round()
        assert world.reconciler.drains.wanted == {"engine-0"}


async def test_an_operators_counts_are_kept(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told()) as world:
        await world.engine(0)
        await world.store.put(keys.SCALE, {"engines:m": 3, "groups:m": 2})
        assert await world.counts() == (3, 2)
        desired = await world.round()
        assert desired is not None
        assert desired.why == {"engines": "by hand", "groups": "by hand"}


async def test_a_fact_that_cannot_be_read_leaves_the_counts_and_ends_no_process(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told()) as world:
        await world.engine(0)
        before = await world.counts()
        await world.store.put(keys.SCALE, {"engines:m": "three"})
        assert await world.counts() == before
        await world.store.put(keys.SCALE, {"engines:m": 3})
        assert (await world.counts())[0] == 3


async def test_a_base_that_nobody_uses_has_no_engine_and_the_first_request_wakes_one(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told(), least=0) as world:
        await world.engine(0)
        await world.group(0)
        await world.counts()
        for _ in range(int(IDLE_S / 10) + 7):
            await world.round(10)
        await world.engine(0, state="draining")
        await world.group(0, state="draining")
        await world.round()
        assert await world.counts() == (0, 0)
        assert await world.asleep() == {BASE: "m"}
        world.came(1)
        assert await world.counts() == (1, 1)
        assert await world.asleep() == {BASE: "m"}, "nobody is ready yet"
        world.members.bury(Death(kind="engine", id="engine-0", incarnation="x", epoch=1))
        await world.engine(1)
        await world.round()
        assert await world.asleep() == {}


async def test_an_engine_that_takes_longer_to_come_than_a_base_may_be_idle_comes(tmp_path: Path) -> None:
    """Whoever it comes for waits meanwhile, or was told when to come again."""

    async def wait(seconds: float) -> tuple[int, int]:
        for _ in range(int(seconds / 10) - 1):
            await world.round(10)
        return await world.counts(10)

    async with a_world(tmp_path, Told(), least=0) as world:
        await world.store.put(keys.ASLEEP, {BASE: "m"})
        await world.store.put(keys.desired(BASE), Desired(base=BASE, model="m", epoch=1, engines=0, groups=0))
        world.came(1)
        assert await world.counts() == (1, 1)
        assert await wait(2 * IDLE_S) == (1, 1), "no process has said a word yet"
        await world.engine(0, state="starting")
        assert await wait(2 * IDLE_S) == (1, 1), "its weights are read"
        await world.engine(0)
        assert await wait(IDLE_S - LEAD_S) == (1, 1)
        await wait(2 * LEAD_S)
        await world.engine(0, state="draining")
        assert await wait(10) == (0, 0), "nobody came again"


async def test_a_base_that_sleeps_while_the_store_loses_everything_is_woken_all_the_same(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told(), least=0) as world:
        await world.store.put(keys.ASLEEP, {BASE: "m"})
        await world.store.put(keys.desired(BASE), Desired(base=BASE, model="m", epoch=1, engines=0, groups=0))
        await world.store.put(keys.demand(BASE), DemandHistory(bucket_s=LEAD_S / 6, ended_at=0.0, counts=(0,) * 200))
        assert await world.counts() == (0, 0)
        world.store.empty()
        await world.leadership.step()
        await world.leadership.step()
        assert await world.counts() == (0, 0)
        assert await world.asleep() == {BASE: "m"}
        world.came(1)
        assert await world.counts() == (1, 1)


async def test_a_coordinator_that_was_started_while_a_base_slept_knows_it(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told(), least=0) as world:
        await world.store.put(keys.ASLEEP, {BASE: "m"})
        await world.store.put(keys.desired(BASE), Desired(base=BASE, model="m", epoch=1, engines=0, groups=0))
        await world.store.put(keys.demand(BASE), DemandHistory(bucket_s=LEAD_S / 6, ended_at=0.0, counts=(0,) * 200))
        assert await world.counts() == (0, 0)
        assert [one["model"] for one in world.scaler.show()["desired"]] == ["m"]
        await world.store.put(keys.SCALE, {"engines:m": 1})
        assert await world.counts() == (1, 0)


async def test_a_missed_slo_brings_an_engine(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told()) as world:
        await world.engine(0)
        await world.counts()
        world.alarms.misses_first_tokens = lambda base: base == BASE  # type: ignore[method-assign]
        assert await world.counts() == (2, 1)


async def test_where_nobody_follows_counts_are_shown_and_nobody_is_drained(tmp_path: Path) -> None:
    async with a_world(tmp_path, None) as world:
        for number in range(2):
            await world.engine(number, running=1)
        await world.counts()
        desired = await world.round(HOLD_S + 1)
        assert desired is not None
        assert (desired.engines, desired.draining) == (1, ())
        assert not world.scaler.can_grow(BASE)
        (shown,) = world.scaler.show()["desired"]
        assert msgspec.convert(shown, Desired) == desired
        await world.round()
        gauge = world.reconciler.metrics.desired.labels(tier="engines", model="m")
        assert gauge._value.get() == 1


async def test_a_deposed_leader_writes_no_count(tmp_path: Path) -> None:
    async with a_world(tmp_path, Told()) as world:
        await world.engine(0)
        await world.counts()
        world.store._counters[keys.EPOCH] = 2  # another has led since
        await world.store.put(keys.SCALE, {"engines:m": 3})
        assert await world.counts() == (1, 1)


async def test_what_is_carried_out_is_the_word_of_one_leadership(tmp_path: Path) -> None:
    """One that was stopped on the way, and leads again when it wakes up, goes on with nothing of before."""
    backend = Told()
    async with a_world(tmp_path, backend) as world:
        await world.engine(0)
        await world.round()
        assert backend.leads is not None
        assert backend.leads()
        await world.leadership.resign()
        assert not backend.leads()
        await world.leadership.step()
        assert world.leadership.is_leading
        assert not backend.leads()


async def test_a_back_end_that_is_away_is_told_again(tmp_path: Path) -> None:
    backend = Told()
    async with a_world(tmp_path, backend) as world:
        await world.engine(0)
        await world.round()
        backend.is_away = True
        await world.store.put(keys.SCALE, {"engines:m": 2})
        await world.round()
        backend.is_away = False
        await world.round()
        assert backend.counts[-1] == (2, 1)


@pytest.mark.parametrize("is_away", [True, False])
async def test_while_the_store_is_away_nothing_is_decided(tmp_path: Path, *, is_away: bool) -> None:
    backend = Told()
    async with a_world(tmp_path, backend) as world:
        await world.engine(0)
        await world.round()
        world.store.is_connected = not is_away
        await asyncio.gather(world.scaler.round())
        world.store.is_connected = True
        assert await world.counts() == (1, 1)
