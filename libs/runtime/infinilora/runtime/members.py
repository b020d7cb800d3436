"""Heartbeats out, and the mirror of everybody's heartbeats in. The judgement is membership.py's.

heart = Heart(settings.nats_url, lambda: Beat(..., seq=0), interval_s=0.5)
service.spawn(heart.run(), "heart")

async with Members(bus, interval_s=0.5) as members:
    members.alive("engine")
    async for change in members.changes(): ...
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from infinilora.protocol import subjects
from infinilora.protocol.control import Beat, Death, ProcessKind
from infinilora.protocol.errors import Unavailable
from infinilora.runtime.bus import Bus, NatsBus
from infinilora.runtime.membership import SUSPECT_BEATS, Change, Member, Membership, of_kind
from infinilora.runtime.subscription import Subscription
from infinilora.runtime.tasks import Tasks

logger = logging.getLogger(__name__)

CHANGES_LIMIT = 1000
STOP_S = 1.0
SUCCESSION_BEATS = 8
"""For so many beats a process may hear from an earlier one of its id, whose last words are on their way."""
EVERYBODY: tuple[ProcessKind, ...] = ("gateway", "engine", "lora-server", "coordinator")


class Heart:
    """Beats from an OS thread with a connection of its own: a busy event loop does not look like death.

    `build` runs on that thread: it must be cheap, must not block and must only read. Its `seq` is stamped here; and the
    name of another life, once the leading coordinator has called this one dead: it was stopped, or cut off.

    Of two processes under one id the later one is believed, and the other is given nothing for ever: each says so once.
    """

    def __init__(self, nats_url: str, build: Callable[[], Beat], *, interval_s: float = 0.5) -> None:
        self._nats_url = nats_url
        self._build = build
        self._interval_s = interval_s
        self._seq = 0
        self._deaths = 0
        self._namesakes: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._is_stopped = False

    async def run(self) -> None:
        """Beat until cancelled. Raises what the thread died of."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="heart")
        beating = asyncio.get_running_loop().run_in_executor(executor, self._live)
        try:
            await asyncio.shield(beating)
        finally:
            self._is_stopped = True
            self.beat_now()
            await asyncio.wait([beating], timeout=STOP_S)
            executor.shutdown(wait=False)

    def beat_now(self) -> None:
        """Do not wait for the interval: something that others act on has changed. From any thread."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            return  # the thread has ended and its loop with it

    def _live(self) -> None:
        asyncio.run(self._beat_for_ever())

    async def _beat_for_ever(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with NatsBus(self._nats_url, name="heart") as bus:
            bus.on_state(lambda _: self._wake.set())
            told = bus.subscribe(subjects.DEATHS, Death)
            beat: Beat | None = None
            heard: Subscription[Beat] | None = None
            while not self._is_stopped:
                self._wake.clear()
                if beat is not None and any(_is_of(death, beat) for death in told.pop_all()):
                    self._deaths += 1
                    logger.warning("called dead; beats on as another life", extra={"incarnation": beat.incarnation})
                beat = self._stamp(self._build())
                heard = heard or bus.subscribe(subjects.heartbeat(beat.kind, beat.id), Beat)
                self._look_for_namesakes(heard.pop_all(), beat)
                await bus.publish(subjects.heartbeat(beat.kind, beat.id), beat)
                try:
                    async with asyncio.timeout(self._interval_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    def _look_for_namesakes(self, heard: Iterable[Beat], mine: Beat) -> None:
        found = {_process_of(beat) for beat in heard} - {_process_of(mine)} - self._namesakes
        if not found or self._seq <= SUCCESSION_BEATS:
            return
        self._namesakes |= found
        logger.error("another process has this id; give each its own", extra={"kind": mine.kind, "id": mine.id})

    def _stamp(self, beat: Beat) -> Beat:
        self._seq += 1
        life = f"{beat.incarnation}.{self._deaths}" if self._deaths else beat.incarnation
        return msgspec.structs.replace(beat, seq=self._seq, incarnation=life)


def _process_of(beat: Beat) -> str:
    """The same in each of its lives."""
    return beat.incarnation.partition(".")[0]


def _is_of(death: Death, beat: Beat) -> bool:
    return (death.kind, death.id, death.incarnation) == (beat.kind, beat.id, beat.incarnation)


class Members:
    """The mirror: every process of `kinds` that beats on this bus, and how it is. Used inside `async with`."""

    def __init__(
        self,
        bus: Bus,
        *,
        kinds: tuple[ProcessKind, ...] = EVERYBODY,
        interval_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._kinds = kinds
        self._interval_s = interval_s
        self._clock = clock
        self._view = Membership(interval_s)
        self._watchers: list[_Watcher] = []
        self._tasks = Tasks()
        self._epoch = 0
        self._listens_since: float | None = None

    async def __aenter__(self) -> "Members":
        await self._tasks.open()
        self._bus.on_state(self._on_bus)
        beats = [self._bus.subscribe(subjects.heartbeats(kind), Beat) for kind in self._kinds]
        self._tasks.spawn(self._watch(beats, self._bus.subscribe(subjects.DEATHS, Death)))
        return self

    async def __aexit__(self, *exc: Any) -> None:
        for watcher in self._watchers:
            watcher.end()
        await self._tasks.close(*exc)

    @property
    def is_frozen(self) -> bool:
        """Our view may be old: do not decide that anybody died."""
        return self._view.is_frozen(self._clock())

    @property
    def has_heard_all(self) -> bool:
        """Whoever lived when this mirror began to listen has beaten since; false until then."""
        since = self._listens_since
        return since is not None and self._clock() - since >= SUSPECT_BEATS * self._interval_s

    @property
    def now(self) -> float:
        """On the clock of `Member.heard_at`."""
        return self._clock()

    def all(self) -> list[Member]:
        """Everybody, the recently dead included, by kind and id."""
        return self._view.members()

    def alive(self, kind: ProcessKind) -> list[Member]:
        """Those of one kind that may be given work: not dead, and ready."""
        return of_kind(self._view.members(), kind)

    def get(self, kind: ProcessKind, process_id: str) -> Member | None:
        return self._view.get(kind, process_id)

    def changes(self) -> AsyncIterator[Change]:
        """Every change from now on, until the mirror is closed. The present comes first, as `joined`."""
        watcher = _Watcher(Change("joined", m) for m in self.all() if m.health != "dead")
        self._watchers.append(watcher)
        return watcher.changes(lambda: self._watchers.remove(watcher))

    async def _watch(self, subscriptions: list[Subscription[Beat]], deaths: Subscription[Death]) -> None:
        try:
            while True:
                # Polled, not awaited: at a quarter of an interval nothing is late, and a beat costs no wake-up.
                await asyncio.sleep(self._interval_s / 4)
                now = self._clock()
                for subscription in subscriptions:
                    for beat in subscription.pop_all():
                        self._tell(self._view.hear(beat, now))
                for death in deaths.pop_all():
                    self.bury(death)
                self._tell(self._view.sweep(now))
                if self._view.wants_proof:
                    await self._prove()
        finally:
            deaths.close()
            for subscription in subscriptions:
                subscription.close()

    def bury(self, death: Death) -> None:
        """This life is over; unless whoever says so leads no more."""
        if death.epoch >= self._epoch:
            self._epoch = death.epoch
            self._tell(self._view.bury(death.kind, death.id, death.incarnation))

    async def _prove(self) -> None:
        try:
            await self._bus.ping(self._interval_s)
        except Unavailable:
            return
        self._view.bus_proved(self._clock())

    def _on_bus(self, connected: bool) -> None:  # noqa: FBT001 - the bus's callback
        if connected:
            self._listens_since = self._clock() if self._listens_since is None else self._listens_since
            self._view.bus_proved(self._clock())
        else:
            self._view.bus_went()

    def _tell(self, changes: list[Change]) -> None:
        for watcher in self._watchers:
            watcher.push(changes)


class _Watcher:
    """The unread changes of one reader."""

    def __init__(self, present: Iterable[Change]) -> None:
        self._unread: deque[Change] = deque(present, maxlen=CHANGES_LIMIT)
        self._arrived = asyncio.Event()
        self._is_ended = False

    def push(self, changes: list[Change]) -> None:
        self._unread.extend(changes)
        self._arrived.set()

    def end(self) -> None:
        self._is_ended = True
        self._arrived.set()

    async def changes(self, on_end: Callable[[], None]) -> AsyncIterator[Change]:
        try:
            while True:
                while self._unread:
                    yield self._unread.popleft()
                if self._is_ended:
                    return
                self._arrived.clear()
                await self._arrived.wait()
        finally:
            on_end()
