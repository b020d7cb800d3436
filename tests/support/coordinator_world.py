"""One coordinator's reconciler over memory twins, and LoRA servers that beat as a test tells them to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.reconcile import Policy, Reconciler
from infinilora.protocol import keys, subjects
from infinilora.protocol.control import Beat, Command, CommandReply, GroupLoad, Placement, ProcessKind, ProcessState
from infinilora.protocol.errors import StaleEpoch
from infinilora.protocol.ids import Digest, Fingerprint, digest_of
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.members import Members
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.metrics import CoordinatorMetrics, new_registry
from infinilora.runtime.placement import read_placement
from support.registered import register
from support.waiting import eventually

BASE = Fingerprint(digest_of(b"base"))
A, B, C = sorted(digest_of(name.encode()) for name in "abc")
INTERVAL_S = 0.04
POLICY = Policy(
    reconcile_s=60,
    heat_half_lives_s=(60,),
    hot_rps=2.0,
    fill=1.0,
    max_hints=4,
    hint_pause_s=60,
    move_s=30,
    delete_grace_s=5,
    clock_skew_s=0,
)


class World:
    """A store, a bus, LoRA servers that beat, and one coordinator's reconciler."""

    def __init__(
        self,
        store: MemoryStore,
        bus: MemoryBus,
        members: Members,
        blobs: DirectoryBlobs,
        clock: "Clock",
        policy: Policy = POLICY,
        kind: type[Reconciler] = Reconciler,
    ) -> None:
        self.clock = clock
        self.policy = policy
        self.store = store
        self.bus = bus
        self.members = members
        self.leadership = Leadership(store, "c1/a", lease_s=30)
        self.reconciler = kind(
            store=store,
            bus=bus,
            members=members,
            leadership=self.leadership,
            metrics=CoordinatorMetrics(new_registry()),
            policy=policy,
            blobs=blobs,
            clock=clock,
        )
        self.commands: list[tuple[str, Command]] = []
        self._seq = 0

    async def register(
        self, name: str, digest: Digest, num_bytes: int = 10, *, pinned: bool = False, base: Fingerprint = BASE
    ) -> None:
        await register(self.store, name, digest, base, num_bytes=num_bytes, pinned=pinned)

    async def warm(self, digest: Digest, requests: float, *, age_s: float = 0.0) -> None:
        await self.store.add_heat(keys.heats(self.policy.heat_half_lives_s), {digest: requests}, age_s=age_s)

    async def beat(
        self,
        group: str,
        *,
        total: int = 100,
        free: int = 100,
        resident: tuple[Digest, ...] = (),
        pinned: tuple[Digest, ...] = (),
        incarnation: str = "x",
        state: ProcessState = "ready",
        rows_per_s: float = 0.0,
        base: Fingerprint = BASE,
    ) -> None:
        self._seq += 1
        load = GroupLoad(
            bytes_free=min(free, total), bytes_total=total, resident=resident, pinned=pinned, rows_per_s=rows_per_s
        )
        beat = Beat(
            kind="lora-server", id=f"{group}-0", incarnation=incarnation, seq=self._seq, state=state,
            base=base, group=group, load=load,
        )  # fmt: skip
        await self.bus.publish(subjects.heartbeat("lora-server", beat.id), beat)
        seq = self._seq

        def heard() -> bool:
            member = self.members.get("lora-server", beat.id)
            return member is not None and member.beat.seq == seq

        await eventually(heard, "the beat is heard")

    async def obey(self, group: str, *, seen_epoch: int = 0) -> None:
        await self.obey_as("lora-server", f"{group}-0", group, seen_epoch=seen_epoch)

    async def obey_as(self, kind: ProcessKind, process_id: str, name: str = "", *, seen_epoch: int = 0) -> None:
        """Note what a process is ordered, under its id or a name."""

        async def handle(command: Command) -> CommandReply:
            if command.epoch < seen_epoch:
                raise StaleEpoch("too old")
            self.commands.append((name or process_id, command))
            return CommandReply(command_id=command.command_id)

        await self.bus.serve(subjects.commands(kind, process_id), Command, handle)

    async def placement(self) -> Placement | None:
        found = await read_placement(self.store, BASE)
        return found.placement if found else None


class Clock:
    """Stands still unless told: nobody dies of this test's slowness."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def a_world(
    bus: MemoryBus | None = None, policy: Policy = POLICY, kind: type[Reconciler] = Reconciler
) -> AsyncIterator[World]:
    store, bus, clock = MemoryStore(), bus or MemoryBus(), Clock()
    with TemporaryDirectory() as root:
        async with Members(bus, interval_s=INTERVAL_S, clock=clock) as members:
            clock.now += 1  # the frozen start is over
            yield World(store, bus, members, DirectoryBlobs(Path(root)), clock, policy, kind)
