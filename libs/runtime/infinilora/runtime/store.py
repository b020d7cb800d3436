"""Facts that outlive processes, in Redis: values, fields, journals, counters, leases and heat.

Values are msgspec structs as JSON, so that an operator can read them. Every call has a deadline under a
second and raises `Unavailable` past it; after a few failures a breaker answers at once for a while. What is
long is read in parts, each with a deadline of its own. A write that ended in `Unavailable` may have happened:
read before writing again. What must change together changes in one script. Nothing here knows a key
(protocol/keys.py) but the leader's epoch, or who may write it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import log2
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from infinilora.protocol import keys
from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Digest
from infinilora.runtime import heat
from infinilora.runtime import redis_scripts as scripts

T = TypeVar("T")

DEADLINE_S = 0.8
READ_BATCH = 500
"""Values read (or adapters counted) in one command: a few milliseconds of the server's, far below the deadline."""
BREAKER_FAILURES = 3
BREAKER_OPEN_S = 0.5
MAX_CONNECTIONS = 16


class Value(NamedTuple, Generic[T]):
    """A decoded value and the bytes it came from, which a compare-and-set gives back."""

    value: T
    raw: bytes


class Change(NamedTuple):
    """One key of a swap: `expected` is what it must hold (None: nothing, UNSET: anything); `value` replaces that.

    A value of None deletes the key; UNSET leaves it as it is, and the key is a condition only. With `field`, all this
    is of one field of the hash at the key.
    """

    key: str
    expected: bytes | msgspec.UnsetType | None
    value: Any = msgspec.UNSET
    field: str = ""


def fence(epoch: int) -> Change:
    """The condition that nobody has led since."""
    return Change(keys.EPOCH, b"%d" % epoch)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Effect: raise `counter` and note `member` in the journal at `key` under the counter's new value.

    A journal holds each member once, under its newest number: who has read up to a number asks for what came after.
    """

    key: str
    member: str
    counter: str


@dataclass(frozen=True, slots=True)
class Unstamp:
    """Effect: take `member` out of the journal at `key`."""

    key: str
    member: str


Effect = Stamp | Unstamp


@dataclass(frozen=True, slots=True)
class Swap:
    """How a compare-and-set ended. True when it was done; `counters` as each `Stamp` left its own."""

    is_done: bool
    counters: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.is_done


class Lease(NamedTuple):
    """Who holds a lease, and the fencing token of the holding."""

    owner: str
    epoch: int


class Store(Protocol):
    """Facts as a process sees them."""

    async def get(self, key: str, kind: type[T]) -> Value[T] | None: ...
    async def get_many(self, wanted: Sequence[str], kind: type[T]) -> list[Value[T] | None]: ...
    async def get_field(self, key: str, field: str, kind: type[T]) -> Value[T] | None:
        """One field of the hash at a key."""
        ...

    async def put(self, key: str, value: Any, *, ttl_s: float | None = None) -> None: ...
    async def swap(self, changes: Sequence[Change], *, also: Sequence[Effect] = ()) -> Swap:
        """Make every change if every key holds what is expected, with all effects, in one atomic step."""
        ...

    async def journal(self, key: str, after: int, limit: int) -> list[tuple[str, int]]:
        """The first `limit` members stamped after this number, with their numbers, in their order."""
        ...

    async def trim(self, key: str, *, marks: str, floor: str, up_to: int) -> int:
        """Take out of the journal at `key`, and out of `marks`, what `marks` holds up to a number; how many that were.

        The highest number of them is left at `floor`: whoever has read the journal only up to a lower one may have
        missed some. At most READ_BATCH at a time, in the order of `marks`.
        """
        ...

    async def counter(self, key: str) -> int: ...
    async def add_heat(
        self, half_lives: Mapping[str, float], counts: Mapping[Digest, float], *, age_s: float = 0.0
    ) -> float:
        """Count so many requests (each more than none), that came `age_s` ago, at each key under its half-life.

        Exact however many writers add, in whatever order. Returns when they came, in seconds on the store's clock.
        Raises Unavailable when some may have been counted and others not.
        """
        ...

    async def heat(self, half_lives: Mapping[str, float], top: int) -> list[dict[Digest, float]]:
        """For each key the `top` hottest digests, hottest first, in decayed requests per second. Costs by `top`."""
        ...

    async def acquire_lease(
        self, key: str, owner: str, ttl_s: float, *, epoch_key: str = keys.EPOCH, above: int = 0
    ) -> int | None:
        """The new epoch if the lease was free, else None (also when `owner` holds it: renew instead).

        It is higher than any that the store knows, and than `above`: of a store that was emptied the caller knows more.
        """
        ...

    async def renew_lease(self, key: str, owner: str, epoch: int, ttl_s: float) -> bool: ...
    async def release_lease(self, key: str, owner: str, epoch: int) -> bool: ...
    async def lease(self, key: str) -> Lease | None: ...


class RedisStore:
    """The store over a Redis-compatible server. Used inside `async with`; safe from many tasks of one loop."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        # Any: redis-py types every reply as bytes or str; ours are bytes.
        self._redis: Any = redis.asyncio.Redis.from_pool(
            redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=DEADLINE_S,
                socket_connect_timeout=DEADLINE_S,
                socket_timeout=DEADLINE_S,
                retry=Retry(NoBackoff(), 0),
            )
        )
        self._breaker = Breaker(clock)
        self._swap = self._redis.register_script(scripts.SWAP)
        self._trim = self._redis.register_script(scripts.TRIM)
        self._add_heat = self._redis.register_script(scripts.ADD_HEAT)
        self._read_heat = self._redis.register_script(scripts.READ_HEAT)
        self._acquire = self._redis.register_script(scripts.ACQUIRE)
        self._renew = self._redis.register_script(scripts.RENEW)

    async def __aenter__(self) -> "RedisStore":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._redis.aclose()

    @property
    def is_connected(self) -> bool:
        """False while the breaker is open."""
        return not self._breaker.is_open

    async def get(self, key: str, kind: type[T]) -> Value[T] | None:
        async with self._deadline():
            raw = await self._redis.get(key)
        return None if raw is None else Value(decode(key, raw, kind), raw)

    async def get_many(self, wanted: Sequence[str], kind: type[T]) -> list[Value[T] | None]:
        found: list[Value[T] | None] = []
        for start in range(0, len(wanted), READ_BATCH):
            batch = wanted[start : start + READ_BATCH]
            async with self._deadline():
                raws = await self._redis.mget(batch)
            pairs = zip(batch, raws, strict=True)
            found += [None if raw is None else Value(decode(key, raw, kind), raw) for key, raw in pairs]
        return found

    async def get_field(self, key: str, field: str, kind: type[T]) -> Value[T] | None:
        async with self._deadline():
            raw = await self._redis.hget(key, field)
        return None if raw is None else Value(decode(key, raw, kind), raw)

    async def put(self, key: str, value: Any, *, ttl_s: float | None = None) -> None:
        async with self._deadline():
            await self._redis.set(key, msgspec.json.encode(value), px=_ms(ttl_s) if ttl_s else None)

    async def swap(self, changes: Sequence[Change], *, also: Sequence[Effect] = ()) -> Swap:
        effects = [_effect(effect) for effect in also]
        async with self._deadline():
            reply = await self._swap(
                keys=[*(change.key for change in changes), *(key for effect in effects for key in effect[2:])],
                args=[
                    len(changes),
                    *(part for change in changes for part in _change(change)),
                    *(part for effect in effects for part in effect[:2]),
                ],
            )
        return Swap(is_done=bool(reply[0]), counters=tuple(int(count) for count in reply[1:]))

    async def journal(self, key: str, after: int, limit: int) -> list[tuple[str, int]]:
        async with self._deadline():
            found = await self._redis.zrangebyscore(key, f"({after}", "+inf", start=0, num=limit, withscores=True)
        return [(member.decode(), int(number)) for member, number in found]

    async def trim(self, key: str, *, marks: str, floor: str, up_to: int) -> int:
        async with self._deadline():
            return int(await self._trim(keys=[key, marks, floor], args=[up_to, READ_BATCH]))

    async def counter(self, key: str) -> int:
        async with self._deadline():
            raw = await self._redis.get(key)
        return 0 if raw is None else decode(key, raw, int)

    async def add_heat(
        self, half_lives: Mapping[str, float], counts: Mapping[Digest, float], *, age_s: float = 0.0
    ) -> float:
        came_at, pairs = 0.0, list(counts.items())
        for start in range(0, len(pairs), READ_BATCH):
            batch = [part for digest, count in pairs[start : start + READ_BATCH] for part in (digest, log2(count))]
            constants = (heat.LANDMARK_S, age_s, heat.FORGOTTEN, log2(heat.COLD), log2(heat.MOST))
            async with self._deadline():
                said = await self._add_heat(keys=list(half_lives), args=[*constants, *half_lives.values(), *batch])
            came_at = float(said)
        return came_at

    async def heat(self, half_lives: Mapping[str, float], top: int) -> list[dict[Digest, float]]:
        found = []
        for key, half_life_s in half_lives.items():
            async with self._deadline():
                now, text = await self._read_heat(keys=[key], args=[heat.LANDMARK_S, top])
            words = text.decode().split()
            ranked = zip(map(Digest, words[::2]), map(float, words[1::2]), strict=True)
            found.append(heat.rates(ranked, float(now), half_life_s))
        return found

    async def acquire_lease(
        self, key: str, owner: str, ttl_s: float, *, epoch_key: str = keys.EPOCH, above: int = 0
    ) -> int | None:
        async with self._deadline():
            epoch = await self._acquire(keys=[key, epoch_key], args=[owner, _ms(ttl_s), above])
        return None if epoch is None else int(epoch)

    async def renew_lease(self, key: str, owner: str, epoch: int, ttl_s: float) -> bool:
        async with self._deadline():
            return bool(await self._renew(keys=[key], args=[f"{epoch} {owner}", _ms(ttl_s)]))

    async def release_lease(self, key: str, owner: str, epoch: int) -> bool:
        async with self._deadline():
            return bool(await self._renew(keys=[key], args=[f"{epoch} {owner}", 0]))

    async def lease(self, key: str) -> Lease | None:
        async with self._deadline():
            held = await self._redis.get(key)
        return None if held is None else parse_lease(key, held)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        self._breaker.check()
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield
        except redis.exceptions.ResponseError as error:
            if is_passing(error):
                raise Unavailable(f"the store cannot serve this now: {error}", retry_after_s=1.0) from error
            raise Internal(f"the store refused a command: {error}") from error
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            self._breaker.failed()
            raise Unavailable(f"the store does not answer: {error}", retry_after_s=1.0) from error
        self._breaker.succeeded()


_PASSING = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY"})
"""Refusals that say how the server is, not what was wrong with the command: full, failing over, unable to write."""


def is_passing(error: redis.exceptions.ResponseError) -> bool:
    """The code of a refusal that redis-py knows is an attribute, of any other the first word of its text."""
    words = str(error).lstrip("-").split(maxsplit=1)
    return error.status_code in _PASSING or bool(words and words[0] in _PASSING)


class Breaker:
    """Fails at once for a while after several failures in a row; then lets one call try."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= BREAKER_FAILURES

    def check(self) -> None:
        if not self.is_open:
            return
        if self._clock() < self._open_until:
            raise Unavailable("the store is away", retry_after_s=1.0)
        self._open_until = self._clock() + BREAKER_OPEN_S

    def failed(self) -> None:
        self._failures += 1
        self._open_until = self._clock() + BREAKER_OPEN_S

    def succeeded(self) -> None:
        self._failures = 0


def parse_lease(key: str, raw: bytes) -> Lease:
    epoch, _, owner = raw.partition(b" ")
    return Lease(owner.decode(errors="replace"), decode(key, epoch, int))


def decode(key: str, raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Internal(f"what the store holds at {key} is not a {kind.__name__}: {error}") from error


def _change(change: Change) -> tuple[str, bytes, str, bytes]:
    """What the script takes for a change: field, expected (empty: absent), what to do, new value."""
    is_free = change.expected is msgspec.UNSET
    expected = b"" if isinstance(change.expected, msgspec.UnsetType) else change.expected or b""
    if change.value is msgspec.UNSET:
        return change.field, expected, "KEEP", b""
    if change.value is None:
        return change.field, expected, "DROP" if is_free else "DEL", b""
    return change.field, expected, "PUT" if is_free else "SET", msgspec.json.encode(change.value)


def _effect(effect: Effect) -> tuple[str, str, str, str]:
    """What the script takes for an effect: what to do, member; and its two keys."""
    match effect:
        case Stamp(key, member, counter):
            return "STAMP", member, key, counter
        case Unstamp(key, member):
            return "UNSTAMP", member, key, key


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
