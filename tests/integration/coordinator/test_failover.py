"""Loss of anything, on real processes: what is decided, by whom, and within how many beats."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infinilora.protocol import keys, subjects
from infinilora.protocol.control import Beat, Death, Placement
from infinilora.protocol.ids import Digest, Fingerprint, digest_of
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.placement import read_placement
from infinilora.runtime.store import RedisStore
from support.clusters import BEAT_MS, BeatingGroup, Cluster, Coordinator, a_cluster
from support.registered import register
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

BASE = Fingerprint(digest_of(b"base"))
ADAPTERS = tuple(sorted(digest_of(f"adapter {n}".encode()) for n in range(6)))
HEAT_S = 3600
"""So long a half-life that a test sees no decay."""
DETECTED_BEATS = 3
DECIDED_BEATS = 12
"""Three for the death, one to be swept, up to three for a round; then a command, a beat, and a look at it."""


class Fleet:
    """Two coordinators, two groups, six adapters that are asked for, and what is seen of them on the bus."""

    def __init__(self, cluster: Cluster, store: RedisStore) -> None:
        self.cluster = cluster
        self.store = store
        self.latest: dict[str, Beat] = {}
        self.deaths: list[Death] = []

    async def follow(self, bus: NatsBus) -> None:
        async for beat in bus.subscribe(subjects.heartbeats("lora-server"), Beat):
            self.latest[beat.group] = beat

    async def follow_deaths(self, bus: NatsBus) -> None:
        async for death in bus.subscribe(subjects.DEATHS, Death):
            self.deaths.append(death)

    def seq(self, group: str) -> int:
        return self.latest[group].seq

    def resident(self, group: str) -> set[Digest]:
        load: Any = self.latest[group].load
        return set(load.resident)

    async def leader(self) -> Coordinator | None:
        leading = [c for c in self.cluster.coordinators if c.is_running and await c.leads()]
        return leading[0] if len(leading) == 1 else None

    async def placement(self) -> Placement:
        found = await read_placement(self.store, BASE)
        assert found is not None
        return found.placement

    async def is_served_by(self, *groups: str) -> bool:
        """All adapters are told to be on these groups, all of which are there, and resident where they are told."""
        found = await read_placement(self.store, BASE)
        if found is None or set(found.placement.groups) != set(groups):
            return False
        told = found.placement.groups
        is_there = all(set(told[group]) <= self.resident(group) for group in groups)
        return is_there and {digest for held in told.values() for digest in held} == set(ADAPTERS)


async def register_all(store: RedisStore) -> None:
    for number, digest in enumerate(ADAPTERS):
        await register(store, f"a{number}", digest, BASE)
        await store.add_heat(keys.heats([HEAT_S]), {digest: 100.0 + number})


@asynccontextmanager
async def a_fleet(home: Path) -> AsyncIterator[Fleet]:
    """Settled: everything is placed, and resident where it is."""
    async with a_cluster(home) as cluster, RedisStore(cluster.valkey.url) as store, NatsBus(cluster.nats.url) as bus:
        fleet = Fleet(cluster, store)
        loop = asyncio.get_running_loop()
        following = [loop.create_task(fleet.follow(bus)), loop.create_task(fleet.follow_deaths(bus))]
        settings = {"HEAT_HALF_LIVES_S": str(HEAT_S), "HOT_RPS": "1000", "HINT_PAUSE_S": "2", "MAX_HINTS": "8"}
        await register_all(store)
        for name in ("c1", "c2"):
            await cluster.coordinator(name, **settings)
        for name in ("g1", "g2"):
            cluster.group(name, BASE)
        try:
            await settled(fleet)
            yield fleet
        finally:
            for task in following:
                task.cancel()
            await asyncio.wait(following)


async def settled(fleet: Fleet) -> None:
    """Everything is placed and there, and stays where it is: a move writes a table before it and one after it."""
    since: dict[int, int] = {}

    async def is_so() -> bool:
        if not ({"g1", "g2"} <= fleet.latest.keys() and await fleet.is_served_by("g1", "g2")):
            since.clear()
            return False
        told = await fleet.placement()
        is_once = sum(map(len, told.groups.values())) == len(ADAPTERS)
        return is_once and fleet.seq("g1") - since.setdefault(told.revision, fleet.seq("g1")) >= DECIDED_BEATS

    await eventually(is_so, "everything is placed and there", 40)

    async def one_leads() -> bool:
        return await fleet.leader() is not None

    await eventually(one_leads, "one leads", 20)


async def within_beats(fleet: Fleet, of: str, beats: int, is_true: Callable[[], Awaitable[bool]], what: str) -> None:
    """Before a group that goes on has beaten so often: a busy machine beats as late as it decides."""
    begin = fleet.seq(of)
    await eventually(is_true, what, 60)
    assert fleet.seq(of) - begin <= beats, f"{what}: took {fleet.seq(of) - begin} beats"


async def test_a_killed_groups_adapters_are_elsewhere_within_beats_and_the_time_is_a_metric(tmp_path: Path) -> None:
    async with a_fleet(tmp_path) as fleet:
        lost = fleet.resident("g1")
        assert lost, "both groups had some"
        fleet.cluster.groups[0].kill()
        await within_beats(fleet, "g2", DECIDED_BEATS, lambda: fleet.is_served_by("g2"), "all is on the other group")
        assert [(death.id, death.epoch) for death in fleet.deaths] == [("g1-0", (await fleet.placement()).epoch)]
        leader = await fleet.leader()
        assert leader is not None

        async def is_measured() -> bool:
            return "infinilora_recovery_seconds_count 1.0" in await leader.metrics()

        await eventually(is_measured, "the recovery is measured", 20)


async def test_a_stopped_group_counts_as_dead_and_comes_back_as_another_life(tmp_path: Path) -> None:
    async with a_fleet(tmp_path) as fleet:
        group, before = fleet.cluster.groups[0], fleet.latest["g1"].incarnation
        group.freeze()
        await within_beats(fleet, "g2", DECIDED_BEATS, lambda: fleet.is_served_by("g2"), "all is on the other group")
        assert [(death.id, death.incarnation) for death in fleet.deaths] == [("g1-0", before)]
        group.thaw()

        def is_another() -> bool:
            return fleet.latest["g1"].incarnation not in ("", before)

        await eventually(is_another, "it beats as another life", 20)
        leader = await fleet.leader()
        assert leader is not None

        async def is_back() -> bool:
            members = {m["id"]: m for m in (await leader.fleet())["members"]}
            return (members["g1-0"]["health"], members["g1-0"]["incarnation"]) == (
                "alive",
                fleet.latest["g1"].incarnation,
            )

        await eventually(is_back, "it is a member again", 20)


HALF_A_MINUTE = pytest.param(30_000 // BEAT_MS, marks=[pytest.mark.soak, pytest.mark.timeout(600)])


@pytest.mark.parametrize("beats", [6 * DETECTED_BEATS, HALF_A_MINUTE])
async def test_a_broker_or_store_that_hangs_is_nobodys_death(tmp_path: Path, beats: int) -> None:
    async with a_fleet(tmp_path) as fleet:
        before, nats, valkey = await fleet.placement(), fleet.cluster.nats, fleet.cluster.valkey
        for servers in ((nats,), (valkey,), (nats, valkey)):
            for server in servers:
                server.freeze()
            await asyncio.sleep(beats * BEAT_MS / 1000)
            for server in servers:
                server.thaw()
            await settled(fleet)
            assert fleet.deaths == []
            assert (await fleet.placement()).groups == before.groups


ROUNDS = [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_whatever_is_killed_the_fleet_settles_again_under_one_leader(tmp_path: Path, rounds: int) -> None:
    dice = random.Random(rounds)
    async with a_fleet(tmp_path) as fleet:
        epoch = 0
        for _ in range(rounds):
            victims: list[Coordinator | BeatingGroup] = [*fleet.cluster.coordinators, *fleet.cluster.groups]
            dice.shuffle(victims)
            for victim in victims:
                await lose_and_replace(fleet, victim)
                now = (await fleet.placement()).epoch
                assert now >= epoch, "the epoch of what is told never falls"
                epoch = now


async def lose_and_replace(fleet: Fleet, victim: Coordinator | BeatingGroup) -> None:
    victim.kill()
    if isinstance(victim, BeatingGroup):
        left = next(group.id for group in fleet.cluster.groups if group is not victim)
        await within_beats(fleet, left, DECIDED_BEATS, lambda: fleet.is_served_by(left), f"{left} has all")
        victim.launch()
    else:

        async def one_leads() -> bool:
            return await fleet.leader() is not None

        await eventually(one_leads, "the other leads", 20)
        await asyncio.to_thread(victim.start)
    await settled(fleet)
