"""The engines as this gateway sees them, and its calls to them.

The view is made of heartbeats, of what the gateway itself has in flight, and of how its calls ended; the choice is
`scores.pick`'s, and whether an engine may be called `breaker.Breakers`'. Nothing is decided here.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import NamedTuple

from infinilora.gateway import scores
from infinilora.gateway.breaker import Breakers
from infinilora.gateway.prefixes import Chain, PrefixMemory
from infinilora.gateway.scores import EngineView, Wanted
from infinilora.gateway.states import State, States
from infinilora.protocol.control import EngineLoad
from infinilora.protocol.errors import DeadlineExceeded, InfiniLoraError, Unavailable
from infinilora.protocol.generate_pb2 import DESCRIPTOR, FilePiece, GenerateEvent, GenerateRequest, HealthRequest
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.membership import Member, of_kind
from infinilora.runtime.rpc import Channels, Unreachable

logger = logging.getLogger(__name__)

ENGINE_SERVICE = DESCRIPTOR.services_by_name["Engine"]
HEALTH_SERVICE = DESCRIPTOR.services_by_name["EngineHealth"]
FACTS_SERVICE = DESCRIPTOR.services_by_name["BaseFacts"]
HEALTH_TICK_S = 0.1
HEALTH_TIMEOUT_S = 1.0


class Engine(NamedTuple):
    """One life of an engine process."""

    key: str
    id: str
    address: str


class Fleet:
    """Engines by heartbeat. `members` gives all members known now; `note_change` is called when they change.

    `asleep`: the bases, with their served names, that get an engine when they are asked for. `has_heard_all`: whether
    every engine that lives had the time to be among the members.
    """

    def __init__(
        self,
        members: Callable[[], Iterable[Member]],
        channels: Channels,
        *,
        asleep: Callable[[], Mapping[Fingerprint, str]] = dict,
        has_heard_all: Callable[[], bool] = lambda: True,
    ) -> None:
        self._members = members
        self._has_heard_all = has_heard_all
        self._channels = channels
        self._asleep = asleep
        self._in_flight: dict[str, int] = {}
        self._breakers = Breakers()
        self._openings: Counter[str] = Counter()
        """Of breakers, by engine id: a new life of an engine counts on."""
        self._prefixes = PrefixMemory()
        self._calls: dict[str, int] = {}  # open ones, for each address that a channel was opened to
        self._known: dict[str, Fingerprint] = {}
        self._change = asyncio.Event()

    # What is served

    def served(self) -> dict[str, Fingerprint]:
        """Base models by served name for which an engine is alive, or comes with the first request."""
        served = {model: base for base, model in self._asleep().items()}
        served |= {m.beat.model: m.beat.base for m in self._engines() if m.beat.base and m.beat.model}
        self._known |= served
        return served

    def state(self, base: Fingerprint) -> State:
        """How a served base fares: `pending` sleeps, and gets an engine when it is asked for."""
        states = {m.beat.state for m in self._engines() if m.beat.base == base and m.health != "dead"}
        if states & {"ready", "draining"}:
            return "ready" if "ready" in states else "draining"
        return "loading" if states else "pending"

    def why_not(self, base: Fingerprint) -> str:
        """Why nobody takes a request of a base, for whoever has waited."""
        if base in self._asleep():
            return "this base model had no engine, as nobody used it; one is started, which takes a while"
        return "no engine of this base model is alive"

    def known(self) -> dict[str, Fingerprint]:
        """Base models served now or at any time since this process began."""
        self.served()
        return self._known

    @property
    def is_informed(self) -> bool:
        """Whether a base model that is not known is not served."""
        return bool(self.known()) and self._has_heard_all()

    def states(self) -> States:
        """How adapters fare now."""
        return States(self._members())

    # Which engine

    def pick(
        self, base: Fingerprint, digest: Digest | None, avoid: Collection[str] = (), *, chain: Chain = ()
    ) -> Engine | None:
        """The engine for a sequence whose prompt has this chain; None when there is none now."""
        engines = {_key(member): member for member in self._members() if member.beat.kind == "engine"}
        wanted = Wanted(base, digest, self._prefixes.matches(chain), avoid)
        chosen = scores.pick([self._view(member) for member in engines.values()], wanted)
        return None if chosen is None else _engine(engines[chosen.key])

    def note_prefix(self, engine: Engine, chain: Chain) -> None:
        """This engine computes these tokens now: what begins alike may find them there."""
        self._prefixes.note(chain, engine.key)

    async def changed(self, timeout_s: float) -> bool:
        """Wait for a change among the members; False when none came in time."""
        self._change.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._change.wait()
        except TimeoutError:
            return False
        return True

    def note_change(self) -> None:
        self.served()
        self._change.set()

    def note_failure(self, engine: Engine, error: InfiniLoraError) -> None:
        """An engine that says why it does not is there; one that says nothing is left alone until it answers."""
        if isinstance(error, Unreachable) and not self._breakers.is_open(engine.key):
            self._breakers.note_silence(engine.key, time.monotonic())
            self._openings[engine.id] += 1
            logger.warning("engine does not answer", extra={"engine_id": engine.id, "reason": error.message})

    async def watch_health(self) -> None:
        """Ask engines that did not answer whether they do again. Runs for ever."""
        while True:
            await asyncio.sleep(HEALTH_TICK_S)
            if due := self._breakers.due(time.monotonic()):
                async with asyncio.TaskGroup() as group:
                    for member in self._members():
                        if member.beat.kind == "engine" and _key(member) in due:
                            group.create_task(self._ask_health(_engine(member)))

    async def _ask_health(self, engine: Engine) -> None:
        client = self._channels.client(HEALTH_SERVICE, engine.address)
        with self._calling(engine):
            try:
                await client.unary("Check", HealthRequest(), timeout_s=HEALTH_TIMEOUT_S)
            except (Unreachable, DeadlineExceeded):
                return
            except InfiniLoraError as error:  # whatever it says, it answers
                logger.debug("health refused", extra={"engine_id": engine.id, "code": error.code})
        self._breakers.note_answer(engine.key)
        self._change.set()
        logger.info("engine answers again", extra={"engine_id": engine.id})

    async def forget_gone(self) -> None:
        """Close the channels to addresses at which nobody is known any more: engines come and go for ever."""
        self._breakers.keep({_key(member) for member in self._members()})
        ids = {member.beat.id for member in self._members()}
        self._openings = Counter({engine_id: times for engine_id, times in self._openings.items() if engine_id in ids})
        there = {member.beat.address for member in self._members()}
        for address in [a for a, calls in self._calls.items() if not calls and a not in there]:
            del self._calls[address]
            await self._channels.forget(address)

    def breakers(self) -> list[tuple[str, bool, int]]:
        """Of each engine that is known: its id, whether its breaker is open, how often it has opened."""
        engines = [member for member in self._members() if member.beat.kind == "engine"]
        return [(m.beat.id, self._breakers.is_open(_key(m)), self._openings[m.beat.id]) for m in engines]

    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    # Calls

    async def generate(
        self, engine: Engine, request: GenerateRequest, deadline: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        """One engine's events for one sequence; closing it cancels the sequence there."""
        client = self._channels.client(ENGINE_SERVICE, engine.address)
        self._in_flight[engine.key] = self._in_flight.get(engine.key, 0) + 1
        try:
            with self._calling(engine):
                async with aclosing(client.stream("Generate", request, timeout_s=_left_s(deadline))) as events:
                    async for event in events:
                        yield event
        finally:
            self._in_flight[engine.key] -= 1
            if not self._in_flight[engine.key]:
                del self._in_flight[engine.key]

    async def facts(
        self, engine: Engine, request: AsyncIterator[bytes], deadline: float
    ) -> AsyncGenerator[bytes, None]:
        """One engine's answer to questions about its weights, both files piece by piece."""
        client = self._channels.client(FACTS_SERVICE, engine.address)
        with self._calling(engine):
            async with client.duplex("Answer", timeout_s=_left_s(deadline)) as call:
                with suppress(Unavailable):  # an engine that will not hear the end says why in its answer
                    async for data in request:
                        await call.send(FilePiece(data=data))
                    await call.finish()
                async for piece in call:
                    yield piece.data

    @contextmanager
    def _calling(self, engine: Engine) -> Iterator[None]:
        """The channel stays open for a call's time."""
        self._calls[engine.address] = self._calls.get(engine.address, 0) + 1
        try:
            yield
        finally:
            self._calls[engine.address] -= 1

    def _engines(self) -> list[Member]:
        return of_kind(self._members(), "engine")

    def _view(self, member: Member) -> EngineView:
        key, load = _key(member), member.beat.load
        engine_load = load if isinstance(load, EngineLoad) else EngineLoad()
        total = engine_load.kv_blocks_total
        return EngineView(
            key=key,
            base=member.beat.base,
            is_alive=member.health != "dead" and member.beat.state in ("ready", "draining"),
            is_draining=member.beat.state == "draining",
            is_suspect=member.health == "suspect",
            is_open=self._breakers.is_open(key),
            running=engine_load.running,
            waiting=engine_load.waiting,
            in_flight=self._in_flight.get(key, 0),
            kv_free=engine_load.kv_blocks_free / total if total else 1.0,
            digests=frozenset(engine_load.digests + engine_load.resident),
        )


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _engine(member: Member) -> Engine:
    return Engine(_key(member), member.beat.id, member.beat.address)


def _key(member: Member) -> str:
    return f"{member.beat.id}/{member.beat.incarnation}"
