"""Deleted adapters leave the store and every process, and never one that has a name again."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from infinilora.coordinator.collect import MAX_LOOKED_AT, WITHIN_S, Collector, Times
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.orders import Orders
from infinilora.coordinator.registry import Registry
from infinilora.gateway.ledger import Ledger
from infinilora.gateway.registry import Registry as Mirror
from infinilora.gateway.versions import Content
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import DigestRecord
from infinilora.protocol.control import Beat, Command, CommandReply, EngineLoad, Forget, GroupLoad, ProcessKind
from infinilora.protocol.errors import InvalidRequest, Unavailable
from infinilora.protocol.ids import Digest, Fingerprint, digest_of
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.members import Members
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.metrics import CoordinatorMetrics, new_registry
from infinilora.runtime.store import Change, Effect, Swap
from support.waiting import eventually

BASE = Fingerprint(digest_of(b"base"))
A, B = digest_of(b"a"), digest_of(b"b")
GRACE_S, SKEW_S = 5.0, 20.0
HOLD_S = WITHIN_S + SKEW_S


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class InterruptedBlobs(DirectoryBlobs):
    """Can be away, and can be held up between the moment that a deletion is decided and the deletion."""

    is_away = False
    may_go_on: threading.Event | None = None

    @override
    def deletion(self, name: str, *, within_s: int) -> Callable[[], None]:
        if self.is_away:
            raise Unavailable("the object store is away")
        delete, may_go_on = super().deletion(name, within_s=within_s), self.may_go_on

        def delayed() -> None:
            assert may_go_on is None or may_go_on.wait(10)
            delete()

        return delayed


class NotingStore(MemoryStore):
    """Notes what it was asked to swap."""

    def __init__(self) -> None:
        super().__init__()
        self.swaps: list[Sequence[Change]] = []

    @override
    async def swap(self, changes: Sequence[Change], *, also: Sequence[Effect] = ()) -> Swap:
        self.swaps.append(changes)
        return await super().swap(changes, also=also)


class World:
    """A ledger that registers and deletes, processes that beat and obey, and one collector of the leader's."""

    def __init__(self, root: Path, bus: MemoryBus, members: Members, clock: Clock) -> None:
        self.store = NotingStore()
        self.bus = bus
        self.members = members
        self.clock = clock
        self.blobs = InterruptedBlobs(root)
        self.ledger = Ledger(self.store, bus, Mirror(self.store, bus))
        self.leadership = Leadership(self.store, "c1/a", lease_s=3000, clock=clock)
        self.orders: list[tuple[str, Command]] = []
        self.refuse: dict[str, Exception] = {}
        self._seq = 0
        self.collector = self.another()

    async def succeed(self) -> Collector:
        """Another coordinator leads from now on, while this one does not know yet; the collector of that one."""
        lease = await self.store.lease(keys.LEADER)
        assert lease is not None
        await self.store.release_lease(keys.LEADER, lease.owner, lease.epoch)
        successor = Leadership(self.store, f"c{lease.epoch + 1}/a", lease_s=3000, clock=self.clock)
        await successor.step()
        return self.another(successor)

    def another(self, leadership: Leadership | None = None) -> Collector:
        """A collector as another leader would have it: it remembers nothing."""
        leadership = leadership or self.leadership
        return Collector(
            store=self.store,
            blobs=self.blobs,
            members=self.members,
            leadership=leadership,
            registry=Registry(self.store),
            orders=Orders(self.bus, leadership, CoordinatorMetrics(new_registry())),
            times=Times(GRACE_S, SKEW_S),
            clock=self.clock,
        )

    async def condemn(self, name: str, digest: Digest) -> None:
        """A name that was, and the grace time after it: the next round drops its digest."""
        await self.register(name, digest)
        await self.ledger.delete("t", name)
        await self.rounds()
        self.clock.now += GRACE_S

    async def register(self, name: str, digest: Digest) -> None:
        self.blobs.put(keys.packed(digest), b"packed")
        self.blobs.put(keys.reference(digest), b"its answers")
        await self.ledger.watch(digest)
        await self.ledger.point(
            "t", name, Content(BASE, digest, source="", num_bytes=6, max_rank=1, num_tensors=2, may_replace=True)
        )

    async def beat(self, kind: ProcessKind, name: str, load: EngineLoad | GroupLoad) -> None:
        self._seq += 1
        seq = self._seq
        beat = Beat(kind=kind, id=name, incarnation="x", seq=seq, state="ready", base=BASE, load=load)
        await self.bus.publish(subjects.heartbeat(kind, name), beat)

        def heard() -> bool:
            member = self.members.get(kind, name)
            return member is not None and member.beat.seq == seq

        await eventually(heard, "the beat is heard")

        async def obey(command: Command) -> CommandReply:
            if name in self.refuse:
                raise self.refuse[name]
            self.orders.append((name, command))
            return CommandReply(command_id=command.command_id)

        await self.bus.serve(subjects.commands(kind, name), Command, obey)

    async def rounds(self, count: int = 3) -> None:
        epoch = self.leadership.holding
        assert epoch is not None
        for _ in range(count):
            await self.collector.round(epoch)

    @property
    def claims(self) -> int:
        """How often a leader has made sure, right before a deletion, that it leads."""
        return sum(
            [change.value for change in changes] == [msgspec.UNSET, msgspec.UNSET] for changes in self.store.swaps
        )

    def has(self, digest: Digest) -> bool:
        """Both of its objects, or none: half of an adapter is a fault."""
        there = {self.blobs.stat(name) is not None for name in (keys.packed(digest), keys.reference(digest))}
        assert len(there) == 1, "one of two objects is left"
        return there.pop()

    async def state(self, digest: Digest) -> str | None:
        found = await self.store.get(keys.digest(digest), DigestRecord)
        return found.value.state if found else None

    async def condemned(self) -> list[str]:
        return [digest for digest, _ in await self.store.journal(keys.CONDEMNED, 0, 100)]


@asynccontextmanager
async def a_world(root: Path) -> AsyncIterator[World]:
    bus, clock = MemoryBus(), Clock()
    async with Members(bus, interval_s=0.04, clock=clock) as members:
        clock.now += 1
        world = World(root, bus, members, clock)
        await world.leadership.step()
        yield world


async def test_what_has_a_name_is_kept_and_looked_at_once(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.register("one", A)
        await world.rounds()
        world.clock.now += GRACE_S
        await world.rounds()
        assert (world.has(A), await world.state(A), await world.condemned()) == (True, "live", [])


async def test_a_deleted_adapter_leaves_every_process_and_then_the_store(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.register("one", A)
        await world.register("two", B)
        await world.ledger.delete("t", "one")
        await world.beat("lora-server", "g1-0", GroupLoad(resident=(A, B)))
        await world.beat("engine", "e1", EngineLoad())
        await world.rounds()
        assert world.orders == [], "requests admitted before may still come"
        world.clock.now += GRACE_S
        await world.rounds()
        assert sorted((name, command.body) for name, command in world.orders) == [
            ("e1", Forget(digest=A)),
            ("g1-0", Forget(digest=A)),
        ], "told once"
        assert (world.has(A), await world.state(A)) == (True, "dying"), "it is resident by the last beat"
        await world.beat("lora-server", "g1-0", GroupLoad(resident=(B,)))
        await world.rounds()
        assert (world.has(A), await world.state(A), await world.condemned()) == (False, None, [])
        assert world.has(B)


async def test_a_running_request_keeps_its_adapter(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.register("one", A)
        await world.ledger.delete("t", "one")
        await world.beat("engine", "e1", EngineLoad(digests=(A,)))
        await world.rounds()
        world.clock.now += 10 * GRACE_S
        await world.leadership.step()
        await world.beat("engine", "e1", EngineLoad(digests=(A,)))
        await world.rounds()
        assert (world.has(A), await world.state(A), world.orders) == (True, "live", [])
        await world.beat("engine", "e1", EngineLoad())
        await world.rounds()
        assert not world.has(A)


@pytest.mark.parametrize("kind", ["lora-server", "engine"])
async def test_who_brings_it_back_for_a_late_request_is_told_again(tmp_path: Path, kind: ProcessKind) -> None:
    """A request that was admitted before, and lost its engine, has it loaded once more after everybody dropped it."""
    nothing, again = (
        (GroupLoad(), GroupLoad(resident=(A,))) if kind == "lora-server" else (EngineLoad(), EngineLoad(resident=(A,)))
    )
    async with a_world(tmp_path) as world:
        await world.register("one", A)
        await world.ledger.delete("t", "one")
        await world.beat(kind, "p1", nothing)
        await world.beat("engine", "e2", EngineLoad(digests=(A,)))
        await world.rounds()
        world.clock.now += GRACE_S
        await world.beat("engine", "e2", EngineLoad())
        world.blobs.is_away = True  # or it would be gone by now
        await world.rounds()
        await world.beat("engine", "e2", EngineLoad(digests=(A,)))
        await world.beat(kind, "p1", again)
        await world.rounds()
        assert [name for name, _ in world.orders].count("p1") == 1, "it is leased"
        await world.beat("engine", "e2", EngineLoad())
        await world.rounds()
        assert [name for name, _ in world.orders].count("p1") == 2
        world.blobs.is_away = False
        await world.rounds()
        assert world.has(A), "it is there by the last beat"
        await world.beat(kind, "p1", nothing)
        await world.rounds()
        assert (world.has(A), await world.condemned()) == (False, [])


async def test_nothing_is_taken_for_dropped_that_is_not(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.register("one", A)
        await world.ledger.delete("t", "one")
        await world.beat("lora-server", "g1-0", GroupLoad())
        await world.beat("engine", "e1", EngineLoad())
        world.refuse = {"g1-0": InvalidRequest("what is forget?")}
        await world.rounds()
        world.clock.now += GRACE_S
        await world.rounds()
        assert (world.has(A), await world.state(A)) == (True, "dying")
        del world.refuse["g1-0"]
        await world.rounds()
        assert not world.has(A)


async def test_a_store_that_is_away_is_asked_again(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.condemn("one", A)
        world.blobs.is_away = True
        await world.rounds()
        assert await world.condemned() == [A]
        world.blobs.is_away = False
        world.collector = world.another()  # also a new leader goes on where the old one was
        await world.rounds()
        assert (world.has(A), await world.condemned()) == (False, [])


async def test_redis_may_go_away_in_the_middle(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.register("one", A)
        await world.register("two", B)
        await world.ledger.delete("t", "one")
        await world.ledger.delete("t", "two")
        await world.rounds()
        world.clock.now += GRACE_S

        async def leave() -> None:
            world.store.is_connected = False

        world.collector._store = _interrupted(world.store, "swap", leave)
        await world.rounds(1)
        world.store.is_connected = True
        assert (await world.state(A), await world.state(B)) == ("live", "live")
        await world.rounds()
        assert (world.has(A), world.has(B)) == (False, False)


async def test_a_digest_with_another_name_stays_and_loses_the_dead_reference(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.register("one", A)
        await world.register("two", A)
        await world.ledger.delete("t", "one")
        await world.rounds()
        world.clock.now += GRACE_S
        await world.rounds()
        found = await world.store.get(keys.digest(A), DigestRecord)
        assert found is not None
        assert (world.has(A), found.value.refs) == (True, ("t/two@v1",))


async def test_many_that_are_deleted_together_wait_together(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        digests = [digest_of(b"%d" % number) for number in range(MAX_LOOKED_AT + 6)]
        for number, digest in enumerate(digests):
            await world.register(f"n{number}", digest)
        await world.rounds()
        for number in range(len(digests)):
            await world.ledger.delete("t", f"n{number}")
        await world.rounds(1)
        world.clock.now += GRACE_S
        await world.leadership.step()
        await world.rounds(6)
        assert await world.condemned() == []
        assert not any(map(world.has, digests))


async def test_a_name_that_came_and_went_between_two_rounds_has_its_whole_grace(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.ledger.watch(A)
        await world.rounds(1)
        world.clock.now += GRACE_S
        await world.register("one", A)
        await world.ledger.delete("t", "one")
        await world.rounds()
        assert (world.has(A), await world.state(A)) == (True, "live"), "requests admitted before may still come"
        world.clock.now += GRACE_S
        await world.rounds()
        assert not world.has(A)


async def test_a_file_that_never_got_a_name_is_deleted(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.blobs.put(keys.packed(A), b"packed")
        await world.ledger.watch(A)
        await world.rounds()
        world.clock.now += GRACE_S
        await world.rounds()
        assert (world.has(A), await world.condemned()) == (False, [])


@pytest.mark.parametrize("moment", ["records read", "registry read", "dying written"])
async def test_a_registration_at_any_moment_of_a_collection_keeps_the_file(tmp_path: Path, moment: str) -> None:
    """The collector is interrupted by a whole registration of the same content, just before each of its steps."""
    async with a_world(tmp_path) as world:
        await world.condemn("one", A)
        method = {"records read": "get_many", "registry read": "counter", "dying written": "swap"}[moment]
        world.collector._registry._store = world.collector._store = _interrupted(
            world.store, method, lambda: world.register("again", A)
        )
        await world.rounds(1)
        await world.rounds()
        assert (world.has(A), await world.state(A)) == (True, "live")
        assert (await world.store.get(keys.digest(A), DigestRecord)) is not None


async def test_a_registration_that_meets_a_dying_digest_waits_and_then_stores_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinilora.gateway.ledger.DYING_PAUSE_S", 0.0)
    async with a_world(tmp_path) as world:
        await world.condemn("one", A)
        await world.rounds(1)
        assert await world.state(A) == "dying"
        with pytest.raises(Unavailable, match="being deleted"):
            await world.register("again", A)
        await world.rounds()
        await world.register("again", A)
        await world.rounds()
        assert (world.has(A), await world.state(A)) == (True, "live")


async def test_a_deposed_leader_deletes_nothing(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.condemn("one", A)
        await world.rounds(1)
        await world.leadership.resign()
        await world.collector.round(1)
        assert (world.has(A), await world.state(A)) == (True, "dying")


async def test_a_leader_that_was_stopped_in_the_middle_of_a_deletion_deletes_nothing_anew(tmp_path: Path) -> None:
    """Between its last look at Redis and the deletion another leads, deletes, and the content gets a name again."""
    async with a_world(tmp_path) as world:
        await world.condemn("one", A)
        await world.rounds(1)
        world.blobs.may_go_on = may_go_on = threading.Event()
        stopped = asyncio.get_running_loop().create_task(world.rounds(1))
        await eventually(lambda: world.claims == 1, "the first leader has claimed it")
        world.blobs.may_go_on = None
        second = await world.succeed()
        await second.round(2)
        world.clock.now += HOLD_S - 0.1
        await second.round(2)
        assert await world.state(A) == "dying", "the first leader's deletion may still arrive"
        world.clock.now += 0.2
        await second.round(2)
        assert (world.has(A), await world.state(A), await world.condemned()) == (False, None, [])
        await world.register("again", A)
        may_go_on.set()
        await stopped
        assert (world.has(A), await world.state(A)) == (True, "live")


@pytest.mark.parametrize("state", ["live", "named", "dying", "gone"])
async def test_a_leader_that_does_not_know_that_another_leads_writes_nothing(tmp_path: Path, state: str) -> None:
    async with a_world(tmp_path) as world:
        await world.condemn("one", A)
        if state == "named":
            await world.register("again", A)
        if state in ("dying", "gone"):
            await world.rounds(1)
        if state == "gone":
            for name in (keys.packed(A), keys.reference(A)):
                world.blobs.delete(name)
        before = (world.has(A), await world.state(A), await world.condemned())
        await world.succeed()
        await world.rounds()
        assert (world.has(A), await world.state(A), await world.condemned()) == before


async def test_a_collection_in_the_middle_of_a_registration_is_noticed(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await world.condemn("one", A)
        world.ledger._store = _interrupted(world.store, "swap", world.rounds)
        content = Content(BASE, A, source="", num_bytes=6, max_rank=1, num_tensors=2, may_replace=False)
        await world.ledger.point("t", "again", content)
        found = await world.store.get(keys.digest(A), DigestRecord)
        assert not world.has(A), "the file was deleted; whoever registers looks for it once more"
        assert found is not None
        assert found.value == DigestRecord(refs=("t/again@v1",))


def _interrupted(inner: MemoryStore, method: str, meanwhile: Callable[[], Awaitable[None]]) -> MemoryStore:
    """A store that does something of the test's once, just before the next call of a method."""
    pending = {method}

    class Interrupted(MemoryStore):
        @override
        def __getattribute__(self, name: str) -> object:
            if name != method or method not in pending:
                return getattr(inner, name)
            pending.clear()

            async def first(*args: object, **kwargs: object) -> object:
                await meanwhile()
                return await getattr(inner, name)(*args, **kwargs)

            return first

    return Interrupted()
