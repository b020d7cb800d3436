"""The twins of bus and store that live in one process: for tests and for what needs no cluster.

They pass the contract suites of the real ones, encode every value as these do, and can be told to be away.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from typing import Any, TypeVar

import msgspec

from infinilora.protocol import keys
from infinilora.protocol.errors import Unavailable, WireError, from_wire
from infinilora.protocol.ids import Digest
from infinilora.runtime import heat
from infinilora.runtime.bus import Handler, answer, decode_reply, encode
from infinilora.runtime.store import (
    READ_BATCH,
    Change,
    Effect,
    Lease,
    Stamp,
    Swap,
    Unstamp,
    Value,
    decode,
    parse_lease,
)
from infinilora.runtime.subscription import Subscription

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)


class MemoryBus:
    """A bus whose broker is this object; all parties of a test share it."""

    def __init__(self) -> None:
        self.is_connected = True
        self.dropped_events = 0
        self.durable: list[tuple[str, bytes]] = []
        """What the broker has on disk."""
        self._waiting: list[tuple[str, bytes]] = []
        self._subscriptions: list[Subscription[Any]] = []
        self._handlers: dict[str, tuple[msgspec.json.Decoder[Any], Handler[Any]]] = {}
        self._watchers: list[Callable[[bool], None]] = []

    async def __aenter__(self) -> "MemoryBus":
        return self

    async def __aexit__(self, *_: object) -> None:
        for subscription in list(self._subscriptions):
            subscription.close()

    def set_connected(self, connected: bool) -> None:  # noqa: FBT001 - the name says what True is
        self.is_connected = connected
        if connected:
            waiting, self._waiting = self._waiting, []
            for subject, payload in waiting:
                self._store(subject, payload)
        for watcher in self._watchers:
            watcher(connected)

    def on_state(self, callback: Callable[[bool], None]) -> None:
        self._watchers.append(callback)
        callback(self.is_connected)

    async def publish(self, subject: str, event: msgspec.Struct) -> None:
        if self.is_connected:
            self._deliver(subject, encode(event))
        else:
            self.dropped_events += 1

    def subscribe(self, subject: str, kind: type[T]) -> Subscription[T]:
        subscription: Subscription[T] = Subscription(subject, kind, self._subscriptions.remove)
        self._subscriptions.append(subscription)
        return subscription

    async def request(self, subject: str, message: msgspec.Struct, kind: type[R], *, timeout_s: float) -> R:
        self._check_connected()
        if subject not in self._handlers:
            raise Unavailable(f"nobody answers on {subject}", retry_after_s=1.0)
        decoder, handler = self._handlers[subject]
        try:
            async with asyncio.timeout(timeout_s):
                reply, headers = await answer(encode(message), decoder, handler)
        except TimeoutError as error:
            raise Unavailable(f"no answer on {subject} within {timeout_s} s", retry_after_s=1.0) from error
        if headers:
            raise from_wire(msgspec.json.decode(reply, type=WireError))
        return decode_reply(reply, kind)

    async def serve(self, subject: str, kind: type[T], handler: Handler[T]) -> None:
        self._handlers[subject] = (msgspec.json.Decoder(kind), handler)

    async def durable_publish(self, subject: str, event: msgspec.Struct) -> None:
        if self.is_connected:
            self._store(subject, encode(event))
        else:
            self._waiting.append((subject, encode(event)))

    async def ping(self, timeout_s: float = 1.0) -> None:  # noqa: ARG002 - the interface's
        self._check_connected()

    async def flush(self, timeout_s: float = 1.0) -> None:  # noqa: ARG002 - the interface's
        self._check_connected()

    def _check_connected(self) -> None:
        if not self.is_connected:
            raise Unavailable("the broker is away", retry_after_s=1.0)

    def _store(self, subject: str, payload: bytes) -> None:
        self.durable.append((subject, payload))
        self._deliver(subject, payload)

    def _deliver(self, subject: str, payload: bytes) -> None:
        for subscription in self._subscriptions:
            if _matches(subscription.subject, subject):
                subscription.push(payload)


def _matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(given) >= len(wanted) and _matches(".".join(wanted[:-1]), ".".join(given[: len(wanted) - 1]))
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))


def _path(key: str, field: str) -> str:
    """Where a field of a hash is kept; no key holds a NUL."""
    return f"{key}\0{field}" if field else key


class MemoryStore:
    """A store in a dict. Everything between two awaits is atomic, as a script is in Redis."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_connected = True
        self._clock = clock
        self._values: dict[str, bytes] = {}
        self._expiry: dict[str, float] = {}
        self._journals: dict[str, dict[str, int]] = {}
        self._counters: dict[str, int] = {}
        self._heat: dict[str, dict[Digest, float]] = {}

    async def __aenter__(self) -> "MemoryStore":
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def get(self, key: str, kind: type[T]) -> Value[T] | None:
        raw = self._read(key)
        return None if raw is None else Value(decode(key, raw, kind), raw)

    async def get_many(self, wanted: Sequence[str], kind: type[T]) -> list[Value[T] | None]:
        return [await self.get(key, kind) for key in wanted]

    async def get_field(self, key: str, field: str, kind: type[T]) -> Value[T] | None:
        return await self.get(_path(key, field), kind)

    async def put(self, key: str, value: Any, *, ttl_s: float | None = None) -> None:
        self._check_connected()
        self._write(key, msgspec.json.encode(value), ttl_s)

    async def swap(self, changes: Sequence[Change], *, also: Sequence[Effect] = ()) -> Swap:
        bound = [change for change in changes if change.expected is not msgspec.UNSET]
        if any(self._read(_path(change.key, change.field)) != change.expected for change in bound):
            return Swap(is_done=False)
        for change in changes:
            path = _path(change.key, change.field)
            if change.value is None:
                self._drop(path)
            elif change.value is not msgspec.UNSET:
                self._write(path, msgspec.json.encode(change.value), None)
        return Swap(is_done=True, counters=self._apply(also))

    async def journal(self, key: str, after: int, limit: int) -> list[tuple[str, int]]:
        self._check_connected()
        found = sorted(self._journals.get(key, {}).items(), key=lambda pair: pair[1])
        return [pair for pair in found if pair[1] > after][:limit]

    async def trim(self, key: str, *, marks: str, floor: str, up_to: int) -> int:
        marked = [pair for pair in await self.journal(marks, 0, READ_BATCH) if pair[1] <= up_to]
        for member, number in marked:
            self._journals.get(key, {}).pop(member, None)
            del self._journals[marks][member]
            self._counters[floor] = number
        return len(marked)

    async def counter(self, key: str) -> int:
        self._check_connected()
        return self._counters.get(key, 0)

    async def add_heat(
        self, half_lives: Mapping[str, float], counts: Mapping[Digest, float], *, age_s: float = 0.0
    ) -> float:
        self._check_connected()
        now = self._clock()
        for key, half_life_s in half_lives.items():
            cold, most = heat.cold_below(now, half_life_s), heat.believed_below(now, half_life_s)
            scores = {digest: score for digest, score in self._heat.get(key, {}).items() if score < most}
            for digest, count in counts.items():
                score = heat.score_of(count, now - age_s, half_life_s)
                scores[digest] = heat.added(scores[digest], score) if digest in scores else score
            self._heat[key] = {digest: score for digest, score in scores.items() if score >= cold}
        return now - age_s

    async def heat(self, half_lives: Mapping[str, float], top: int) -> list[dict[Digest, float]]:
        self._check_connected()
        found = []
        for key, half_life_s in half_lives.items():
            ranked = nlargest(top, self._heat.get(key, {}).items(), key=lambda pair: (pair[1], pair[0]))
            found.append(heat.rates(ranked, self._clock(), half_life_s))
        return found

    async def acquire_lease(
        self, key: str, owner: str, ttl_s: float, *, epoch_key: str = keys.EPOCH, above: int = 0
    ) -> int | None:
        if self._read(key) is not None:
            return None
        epoch = self._counters[epoch_key] = max(self._counters.get(epoch_key, 0), above) + 1
        self._write(key, f"{epoch} {owner}".encode(), ttl_s)
        return epoch

    async def renew_lease(self, key: str, owner: str, epoch: int, ttl_s: float) -> bool:
        held = self._read(key)
        if held != f"{epoch} {owner}".encode():
            return False
        self._write(key, held, ttl_s)
        return True

    async def release_lease(self, key: str, owner: str, epoch: int) -> bool:
        if self._read(key) != f"{epoch} {owner}".encode():
            return False
        self._drop(key)
        return True

    async def lease(self, key: str) -> Lease | None:
        held = self._read(key)
        return None if held is None else parse_lease(key, held)

    def empty(self) -> None:
        """Lose everything, as by FLUSHALL."""
        for facts in (self._values, self._expiry, self._journals, self._counters, self._heat):
            facts.clear()

    def _check_connected(self) -> None:
        if not self.is_connected:
            raise Unavailable("the store is away", retry_after_s=1.0)

    def _read(self, key: str) -> bytes | None:
        self._check_connected()
        if self._expiry.get(key, math.inf) <= self._clock():
            self._drop(key)
        count = self._counters.get(key)
        return self._values.get(key) if count is None else b"%d" % count

    def _write(self, key: str, raw: bytes, ttl_s: float | None) -> None:
        self._values[key] = raw
        self._expiry.pop(key, None)
        if ttl_s:
            self._expiry[key] = self._clock() + ttl_s

    def _drop(self, key: str) -> None:
        self._values.pop(key, None)
        self._expiry.pop(key, None)

    def _apply(self, effects: Sequence[Effect]) -> tuple[int, ...]:
        raised = []
        for effect in effects:
            match effect:
                case Stamp(key, member, counter):
                    self._counters[counter] = self._counters.get(counter, 0) + 1
                    self._journals.setdefault(key, {})[member] = self._counters[counter]
                    raised.append(self._counters[counter])
                case Unstamp(key, member):
                    self._journals.get(key, {}).pop(member, None)
        return tuple(raised)
