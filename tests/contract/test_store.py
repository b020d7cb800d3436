"""What every store promises, in memory and over a real Redis-compatible server."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from uuid import uuid4

import msgspec
import pytest
import redis.asyncio
import redis.exceptions

from infinilora.protocol.errors import Internal, Unavailable
from infinilora.protocol.ids import Digest, digest_of
from infinilora.runtime import heat
from infinilora.runtime.memory import MemoryStore
from infinilora.runtime.store import READ_BATCH, Change, Effect, Lease, RedisStore, Stamp, Store, Unstamp, is_passing
from support.procs import ValkeyServer
from support.waiting import eventually

A, B, C = (digest_of(name.encode()) for name in "abc")


class Record(msgspec.Struct, frozen=True):
    name: str
    number: int = 0


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.integration)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    server: ValkeyServer = request.getfixturevalue("redis_server")
    async with RedisStore(server.url) as store:
        yield store


@pytest.fixture
def key() -> str:
    return f"test:{uuid4().hex}"


async def test_what_was_put_is_what_is_got(store: Store, key: str) -> None:
    assert await store.get(key, Record) is None
    await store.put(key, Record("a", 1))
    found = await store.get(key, Record)
    assert found is not None
    assert found.value == Record("a", 1)
    assert found.raw == b'{"name":"a","number":1}'


async def test_many_are_got_in_order_with_gaps(store: Store, key: str) -> None:
    await store.put(f"{key}:1", Record("one"))
    await store.put(f"{key}:3", Record("three"))
    found = await store.get_many([f"{key}:{n}" for n in (1, 2, 3)], Record)
    assert [value.value.name if value else None for value in found] == ["one", None, "three"]
    assert await store.get_many([], Record) == []


async def test_a_value_with_a_time_to_live_goes_by_itself(store: Store, key: str) -> None:
    await store.put(key, Record("a"), ttl_s=0.05)
    assert await store.get(key, Record) is not None

    async def is_gone() -> bool:
        return await store.get(key, Record) is None

    await eventually(is_gone, "the value expires")


async def test_a_swap_creates_only_what_is_not_there(store: Store, key: str) -> None:
    assert await store.swap([Change(key, None, Record("first"))])
    assert not await store.swap([Change(key, None, Record("second"))])
    found = await store.get(key, Record)
    assert found is not None
    assert found.value == Record("first")


async def test_a_swap_writes_only_over_what_was_read(store: Store, key: str) -> None:
    await store.put(key, Record("a", 1))
    read = await store.get(key, Record)
    assert read is not None
    assert await store.swap([Change(key, read.raw, Record("a", 2))])
    assert not await store.swap([Change(key, read.raw, Record("a", 3))])


async def test_more_than_one_batch_is_got_in_order(store: Store, key: str) -> None:
    wanted = [f"{key}:{n}" for n in range(2 * READ_BATCH + 1)]
    for n in (0, READ_BATCH - 1, READ_BATCH, 2 * READ_BATCH):
        await store.put(wanted[n], Record("there", n))
    found = await store.get_many(wanted, Record)
    assert {n: value.value.number for n, value in enumerate(found) if value} == {
        n: n for n in (0, READ_BATCH - 1, READ_BATCH, 2 * READ_BATCH)
    }
    assert len(found) == len(wanted)


async def test_effects_happen_with_the_write_or_not_at_all(store: Store, key: str) -> None:
    journal, revision = f"{key}:journal", f"{key}:revision"
    also: list[Effect] = [Stamp(journal, "t/a", revision), Stamp(journal, "t/b", revision)]
    done = await store.swap([Change(key, None, Record("a"))], also=also)
    assert done.counters == (1, 2)
    refused = await store.swap([Change(key, None, Record("b"))], also=[Stamp(journal, "t/c", revision)])
    assert not refused
    assert refused.counters == ()
    assert await store.journal(journal, 0, 10) == [("t/a", 1), ("t/b", 2)]
    assert await store.counter(revision) == 2


async def test_a_deletion_takes_the_record_and_its_journal_entry(store: Store, key: str) -> None:
    journal, revision = f"{key}:journal", f"{key}:revision"
    await store.swap([Change(key, None, Record("a"))], also=[Stamp(journal, "t/a", revision)])
    read = await store.get(key, Record)
    assert read is not None
    assert not await store.swap([Change(key, b"other", None)], also=[Unstamp(journal, "t/a")])
    done = await store.swap(
        [Change(key, read.raw, None)], also=[Unstamp(journal, "t/a"), Unstamp(journal, "not there")]
    )
    assert (done.is_done, done.counters) == (True, ())
    assert await store.get(key, Record) is None
    assert await store.journal(journal, 0, 10) == []


async def test_a_journal_is_read_from_any_number_on_and_holds_a_member_once(store: Store, key: str) -> None:
    journal, revision = f"{key}:journal", f"{key}:revision"
    for name in ("a", "b", "a", "c"):
        await store.swap([], also=[Stamp(journal, name, revision)])
    assert await store.journal(journal, 0, 10) == [("b", 2), ("a", 3), ("c", 4)]
    assert await store.journal(journal, 2, 10) == [("a", 3), ("c", 4)]
    assert await store.journal(journal, 0, 1) == [("b", 2)]
    assert await store.journal(journal, 4, 10) == []


async def test_a_swap_of_several_keys_is_made_whole_or_not_at_all(store: Store, key: str) -> None:
    one, two, three = (f"{key}:{n}" for n in range(3))
    await store.put(one, Record("one"))
    await store.put(two, Record("two"))
    read = [await store.get(name, Record) for name in (one, two)]
    raws = [value.raw if value else None for value in read]
    stamp = Stamp(f"{key}:journal", "x", f"{key}:revision")
    for conditions in ((b"other", raws[1], None), (raws[0], b"other", None), (raws[0], raws[1], b"other")):
        changes = [
            Change(name, expected, value)
            for name, expected, value in zip(
                (one, two, three), conditions, (Record("new"), None, Record("n")), strict=True
            )
        ]
        assert not await store.swap(changes, also=[stamp])
    assert [value.value.name if value else None for value in await store.get_many([one, two, three], Record)] == [
        "one",
        "two",
        None,
    ]
    assert await store.journal(f"{key}:journal", 0, 10) == []
    done = await store.swap(
        [Change(one, raws[0]), Change(two, raws[1], None), Change(three, None, Record("three"))], also=[stamp]
    )
    assert done.counters == (1,)
    assert [value.value.name if value else None for value in await store.get_many([one, two, three], Record)] == [
        "one",
        None,
        "three",
    ]


async def test_a_field_of_a_hash_is_changed_as_a_key_is_and_leaves_the_others(store: Store, key: str) -> None:
    assert await store.get_field(key, "a", int) is None
    assert await store.swap([Change(key, None, 3, "a"), Change(key, None, 7, "b")])
    found = await store.get_field(key, "a", int)
    assert found is not None
    assert (found.value, found.raw) == (3, b"3")
    assert not await store.swap([Change(key, None, 4, "a")])
    assert not await store.swap([Change(key, b"2", None, "a")])
    assert await store.swap([Change(key, b"3", None, "a"), Change(key, b"7", field="b")])
    left = [await store.get_field(key, field, int) for field in "ab"]
    assert [value.value if value else None for value in left] == [None, 7]


async def test_a_change_may_expect_anything(store: Store, key: str) -> None:
    one, other = f"{key}:one", f"{key}:other"
    await store.put(one, Record("old"))
    assert not await store.swap([Change(one, msgspec.UNSET, Record("new")), Change(other, b"no")])
    for there in (one, other):
        assert await store.swap([Change(there, msgspec.UNSET, Record("new"))])
    assert [v.value.name if v else None for v in await store.get_many([one, other], Record)] == ["new", "new"]
    for _ in range(2):
        assert await store.swap([Change(one, msgspec.UNSET, None)])
    assert await store.get(one, Record) is None


async def test_a_counter_can_be_a_condition(store: Store, key: str) -> None:
    epoch, lease = f"{key}:epoch", f"{key}:lease"
    await store.acquire_lease(lease, "c1", 5, epoch_key=epoch)
    assert await store.swap([Change(epoch, b"1"), Change(key, None, Record("first"))])
    await store.release_lease(lease, "c1", 1)
    await store.acquire_lease(lease, "c2", 5, epoch_key=epoch)
    assert not await store.swap([Change(epoch, b"1"), Change(key, None, Record("late"))])


async def test_a_journal_is_trimmed_of_what_is_marked_and_says_up_to_where(store: Store, key: str) -> None:
    journal, marks, floor, count = (f"{key}:{name}" for name in ("journal", "marks", "floor", "count"))
    for name in "abcd":
        await store.swap([], also=[Stamp(journal, name, count)])
    await store.swap([], also=[Stamp(marks, name, count) for name in "abd"])  # 5, 6, 7
    await store.swap([], also=[Unstamp(marks, "a")])
    assert await store.trim(journal, marks=marks, floor=floor, up_to=5) == 0
    assert await store.counter(floor) == 0
    assert await store.trim(journal, marks=marks, floor=floor, up_to=6) == 1
    assert await store.journal(journal, 0, 10) == [("a", 1), ("c", 3), ("d", 4)]
    assert await store.journal(marks, 0, 10) == [("d", 7)]
    assert await store.counter(floor) == 6


async def test_a_trim_takes_a_batch_at_a_time(store: Store, key: str) -> None:
    journal, marks, floor, count = (f"{key}:{name}" for name in ("journal", "marks", "floor", "count"))
    names = [f"n{number}" for number in range(READ_BATCH + 1)]
    await store.swap([], also=[Stamp(journal, name, count) for name in names])
    await store.swap([], also=[Stamp(marks, name, count) for name in names])
    taken = [await store.trim(journal, marks=marks, floor=floor, up_to=10_000) for _ in range(3)]
    assert taken == [READ_BATCH, 1, 0]
    assert await store.journal(journal, 0, 10) == []
    assert await store.counter(floor) == 2 * len(names)


async def test_of_many_writers_each_round_exactly_one_wins(store: Store, key: str) -> None:
    await store.put(key, Record("n", 0))
    wins = 0

    async def bump() -> None:
        nonlocal wins
        for _ in range(10):
            read = await store.get(key, Record)
            assert read is not None
            if await store.swap([Change(key, read.raw, Record("n", read.value.number + 1))]):
                wins += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(bump())
    found = await store.get(key, Record)
    assert found is not None
    assert found.value.number == wins > 0


async def test_a_value_of_another_shape_is_named(store: Store, key: str) -> None:
    await store.put(key, {"something": "else"})
    with pytest.raises(Internal, match=r"not a Record"):
        await store.get(key, Record)


async def test_a_counter_and_a_lease_of_another_shape_are_named(redis_server: ValkeyServer, key: str) -> None:
    async with RedisStore(redis_server.url) as store, redis.asyncio.Redis.from_url(redis_server.url) as client:
        for words in ("soon", "x owner", "1.5 owner"):
            await client.set(key, words)
            for read in (store.counter, store.lease):
                with pytest.raises(Internal, match=r"not a int"):
                    await read(key)


# Heat


def at(key: str, *half_lives_s: int) -> dict[str, float]:
    return {f"{key}:{half_life_s}": float(half_life_s) for half_life_s in half_lives_s}


async def test_a_request_is_half_as_hot_a_half_life_later(store: Store, key: str) -> None:
    half_lives = at(key, 600)
    now = await store.add_heat(half_lives, {A: 10})
    before = await store.add_heat(half_lives, {B: 10}, age_s=600)
    (found,) = await store.heat(half_lives, 10)
    assert found[B] / found[A] == pytest.approx(2 ** ((before - now) / 600), rel=1e-6)
    assert found[A] <= 10 * math.log(2) / 600 < 2 * found[A]


async def test_heat_of_many_writers_is_the_sum_over_all_they_counted(store: Store, key: str) -> None:
    """Under every half-life, in whatever order they come: as floats of 64 bits have it from the list of all events."""
    half_lives, random = at(key, 10, 60, 600), Random(7)
    events: dict[Digest, list[tuple[float, float]]] = {digest: [] for digest in (A, B, C)}

    async def write() -> None:
        for _ in range(10):
            counts = {digest: float(random.randint(1, 9)) for digest in random.sample((A, B, C), 2)}
            came_at = await store.add_heat(half_lives, counts, age_s=random.choice((0.0, 5.0, 40.0, 300.0)))
            for digest, count in counts.items():
                events[digest].append((count, came_at))

    async with asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(write())
    latest = max(came_at for listed in events.values() for _, came_at in listed)
    for found, half_life_s in zip(await store.heat(half_lives, 10), half_lives.values(), strict=True):
        exact = {
            digest: math.fsum(count * 2 ** ((came_at - latest) / half_life_s) for count, came_at in listed)
            for digest, listed in events.items()
        }
        assert list(found) == sorted(exact, key=lambda digest: -exact[digest])
        for digest in (B, C):  # rates over a rate: it does not matter when they are read
            assert found[digest] / found[A] == pytest.approx(exact[digest] / exact[A], rel=1e-6)


async def test_the_hottest_come_first_and_as_many_as_are_asked_for(store: Store, key: str) -> None:
    half_lives = at(key, 10)
    await store.add_heat(half_lives, {A: 1, B: 5, C: 3})
    assert [list(found) for found in await store.heat(half_lives, 2)] == [[B, C]]
    await store.add_heat(half_lives, {A: 9})
    assert [list(found) for found in await store.heat(half_lives, 2)] == [[A, B]]


async def test_the_cold_are_forgotten_under_the_half_life_that_they_are_cold_under(store: Store, key: str) -> None:
    half_lives = at(key, 10, 60)
    await store.add_heat(half_lives, {A: 1, B: 1}, age_s=150)
    await store.add_heat(half_lives, {C: 1})
    assert [set(found) for found in await store.heat(half_lives, 10)] == [{C}, {A, B, C}]
    assert await store.heat(at(f"{key}:nothing", 10), 10) == [{}]


@pytest.mark.integration
async def test_what_is_forgotten_takes_no_room_and_a_write_takes_out_a_bounded_number(
    redis_server: ValkeyServer, key: str
) -> None:
    half_lives = at(key, 10)
    async with RedisStore(redis_server.url) as store, redis.asyncio.Redis.from_url(redis_server.url) as client:
        old = {digest_of(b"%d" % number): 1 for number in range(3 * READ_BATCH)}
        await store.add_heat(half_lives, old, age_s=90)
        assert await client.zcard(f"{key}:10") == len(old)
        cold = {str(digest): heat.cold_below(0, 10) - 1 for digest in old}
        await client.zadd(f"{key}:10", cold)
        left = []
        for _ in range(3):
            await store.add_heat(half_lives, {A: 1})
            left.append(await client.zcard(f"{key}:10"))
        assert left == [len(old) - heat.FORGOTTEN + 1, 1, 1]


@pytest.mark.integration
async def test_heat_that_was_counted_while_the_servers_clock_was_ahead_is_counted_anew(
    redis_server: ValkeyServer, key: str
) -> None:
    half_lives = at(key, 10)
    async with RedisStore(redis_server.url) as store, redis.asyncio.Redis.from_url(redis_server.url) as client:
        ahead = await store.add_heat(half_lives, {B: 1}) + 86_400
        await client.zadd(f"{key}:10", {str(A): heat.score_of(1, ahead, 10), str(C): heat.score_of(1, ahead, 10)})
        assert [set(found) for found in await store.heat(half_lives, 10)] == [{B}]
        await store.add_heat(half_lives, {A: 3})
        (found,) = await store.heat(half_lives, 10)
        assert set(found) == {A, B}
        assert found[A] <= 3 * math.log(2) / 10
        assert await client.zcard(f"{key}:10") == 2


# Leases


async def test_a_lease_has_one_owner_and_each_holding_a_higher_epoch(store: Store, key: str) -> None:
    epochs = f"{key}:epoch"
    assert await store.acquire_lease(key, "c1", 5, epoch_key=epochs) == 1
    assert await store.acquire_lease(key, "c2", 5, epoch_key=epochs) is None
    assert await store.lease(key) == Lease("c1", 1)
    assert await store.release_lease(key, "c1", 1)
    assert await store.lease(key) is None
    assert await store.acquire_lease(key, "c2", 5, epoch_key=epochs) == 2
    assert await store.counter(epochs) == 2


async def test_a_new_epoch_is_above_what_the_caller_knows_of_and_never_below_the_stores_own(
    store: Store, key: str
) -> None:
    epochs = f"{key}:epoch"
    for above, epoch in ((41, 42), (7, 43), (43, 44)):
        assert await store.acquire_lease(key, "c1", 5, epoch_key=epochs, above=above) == epoch
        assert await store.counter(epochs) == epoch
        assert await store.release_lease(key, "c1", epoch)


async def test_only_the_holder_of_this_epoch_renews_or_releases(store: Store, key: str) -> None:
    epochs = f"{key}:epoch"
    await store.acquire_lease(key, "c1", 5, epoch_key=epochs)
    assert await store.renew_lease(key, "c1", 1, 5)
    assert not await store.renew_lease(key, "c2", 1, 5)
    assert not await store.renew_lease(key, "c1", 2, 5)
    assert not await store.release_lease(key, "c1", 2)
    assert await store.lease(key) == Lease("c1", 1)


async def test_a_lease_that_is_not_renewed_is_free_again(store: Store, key: str) -> None:
    epochs = f"{key}:epoch"
    await store.acquire_lease(key, "c1", 0.05, epoch_key=epochs)

    async def taken() -> bool:
        return await store.acquire_lease(key, "c2", 5, epoch_key=epochs) == 2

    await eventually(taken, "the lease runs out")
    assert not await store.renew_lease(key, "c1", 1, 5)


async def test_of_many_that_want_a_lease_one_gets_it(store: Store, key: str) -> None:
    epochs = f"{key}:epoch"
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(store.acquire_lease(key, f"c{n}", 5, epoch_key=epochs)) for n in range(10)]
    assert sorted(str(task.result()) for task in tasks) == ["1"] + ["None"] * 9


# Away


@pytest.fixture(params=["killed", "frozen"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.integration
async def test_a_store_that_is_gone_answers_within_a_second_and_loses_nothing(tmp_path: Path, how: str) -> None:
    server = ValkeyServer(tmp_path / "valkey").start()
    loop = asyncio.get_running_loop()
    try:
        async with RedisStore(server.url) as store:
            assert await store.swap([Change("k", None, Record("kept"))], also=[Stamp("journal", "k", "revision")])
            server.kill() if how == "killed" else server.freeze()
            for _ in range(4):
                started = loop.time()
                with pytest.raises(Unavailable, match="store"):
                    await store.get("k", Record)
                assert loop.time() - started < 2.0
            assert not store.is_connected
            await asyncio.to_thread(server.start) if how == "killed" else server.thaw()

            async def is_back() -> bool:
                try:
                    found = await store.get("k", Record)
                except Unavailable:
                    return False
                return found is not None and found.value == Record("kept")

            await eventually(is_back, "the store is back")
            assert store.is_connected
            assert await store.journal("journal", 0, 10) == [("k", 1)]
    finally:
        server.kill()


@pytest.mark.integration
async def test_a_store_that_cannot_write_now_is_away_and_not_at_fault(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path / "valkey").start()
    try:
        async with RedisStore(server.url) as store:
            await store.put("k", Record("before"))
            for setting in ({"maxmemory": "1"}, {"maxmemory": "0", "min-replicas-to-write": "1"}):
                for name, value in setting.items():
                    await store._redis.config_set(name, value)
                with pytest.raises(Unavailable, match="now"):
                    await store.put("k", Record("after"))
                with pytest.raises(Unavailable, match="now"):
                    await store.swap([Change("new", None, Record("after"))], also=[Stamp("journal", "k", "count")])
                found = await store.get("k", Record)
                assert found is not None
                assert found.value == Record("before")
    finally:
        server.kill()


def test_a_refusal_that_redis_py_does_not_know_is_read_from_its_text() -> None:
    assert is_passing(redis.exceptions.ResponseError("MISCONF Errors writing to the AOF file"))
    assert not is_passing(redis.exceptions.ResponseError("WRONGTYPE Operation against a key"))


async def test_the_memory_store_can_be_away_too(key: str) -> None:
    store = MemoryStore()
    store.is_connected = False
    with pytest.raises(Unavailable, match="away"):
        await store.get(key, Record)
