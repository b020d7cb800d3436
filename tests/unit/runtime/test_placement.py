"""A placement in the store and its mirrors: whatever events are lost, in whatever state of the store."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilora.protocol import keys, subjects
from infinilora.protocol.control import Placement, PlacementPart
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest, Fingerprint, digest_of
from infinilora.runtime import placement as subject
from infinilora.runtime.memory import MemoryBus, MemoryStore
from infinilora.runtime.placement import PlacementMirror, Written, change_between, read_placement, write_placement
from support.waiting import eventually

BASE = Fingerprint("base")
DIGESTS = tuple(digest_of(name.encode()) for name in "abcde")
A, B = DIGESTS[:2]

tables = st.dictionaries(st.sampled_from(["g1", "g2", "g3"]), st.sets(st.sampled_from(DIGESTS)), max_size=3)


async def a_store() -> MemoryStore:
    store = MemoryStore()
    assert await store.acquire_lease(keys.LEADER, "c1", 60) == 1
    return store


async def write(store: MemoryStore, before: Written | None, **groups: tuple[Digest, ...]) -> Written:
    written = await write_placement(store, BASE, groups, before, epoch=1)
    assert written is not None
    return written


def by_adapter(groups: dict[str, tuple[Digest, ...]]) -> dict[Digest, set[str]]:
    found: dict[Digest, set[str]] = {}
    for group, digests in groups.items():
        for digest in digests:
            found.setdefault(digest, set()).add(group)
    return found


def known(mirror: PlacementMirror) -> dict[Digest, set[str]]:
    return {digest: set(groups) for digest, groups in mirror.groups_of.items()}


async def test_what_is_written_is_read_by_whoever_knows_any_earlier_state() -> None:
    store = await a_store()
    assert await read_placement(store, BASE) is None
    first = await write(store, None, g1=(A,), g2=(B,))
    read = await read_placement(store, BASE)
    assert read == first
    second = await write(store, first, g1=(A,), g3=())
    wanted = Placement(base=BASE, epoch=1, revision=2, groups={"g1": (A,), "g3": ()})
    for held in (None, first, second):
        found = await read_placement(store, BASE, held)
        assert found is not None
        assert found.placement == wanted
    assert await store.get(keys.placement_part(BASE, "g2"), PlacementPart) is None, "what is gone takes no room"


async def test_only_what_changed_is_written_and_read() -> None:
    store = await a_store()
    first = await write(store, None, g1=(A,), g2=(B,))
    await store.put(keys.placement_part(BASE, "g1"), "not a part")
    second = await write(store, first, g1=(A,), g2=())
    assert await read_placement(store, BASE, first) == second


async def test_a_leader_of_an_older_epoch_or_an_older_state_writes_nothing() -> None:
    store = await a_store()
    first = await write(store, None, g1=(A,))
    second = await write(store, first, g1=(B,))
    assert await write_placement(store, BASE, {"g1": ()}, first, epoch=1) is None
    await store.release_lease(keys.LEADER, "c1", 1)
    await store.acquire_lease(keys.LEADER, "c2", 60)
    assert await write_placement(store, BASE, {"g1": ()}, second, epoch=1) is None
    assert await read_placement(store, BASE) == second


async def test_a_part_that_was_written_after_the_head_was_read_is_not_taken_with_it() -> None:
    store = await a_store()
    await write(store, None, g1=(A,))
    await store.put(keys.placement_part(BASE, "g1"), PlacementPart(revision=2, digests=(B,)))
    with pytest.raises(Unavailable, match="faster"):
        await read_placement(store, BASE)


async def test_an_older_state_of_the_store_is_believed_whole() -> None:
    store = await a_store()
    first = await write(store, None, g1=(A,))
    second = await write(store, first, g1=(A,), g2=(B,))
    other = await a_store()
    begun = await write(other, None, g1=(B,))
    assert await read_placement(other, BASE, second) == begun


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(tables, st.sampled_from(["told", "lost", "looked"])), max_size=12))
def test_a_mirror_knows_what_stands_in_the_store_or_knows_that_it_does_not(
    history: list[tuple[dict[str, set[Digest]], str]],
) -> None:
    async def play() -> None:
        store = await a_store()
        mirror = PlacementMirror(MemoryBus(), store, BASE)
        before: Written | None = None
        for sets, what in history:
            written = await write(store, before, **{group: tuple(sorted(held)) for group, held in sets.items()})
            change = change_between(before.placement if before else None, written.placement)
            if what == "looked" or (what == "told" and not mirror.apply(change)):
                await mirror.look()
            if what != "lost":
                assert mirror.revision == written.placement.revision
                assert known(mirror) == by_adapter(written.placement.groups)
            before = written

    asyncio.run(play())


def test_a_change_that_is_too_long_sends_its_readers_to_the_store() -> None:
    digests = tuple(digest_of(str(n).encode()) for n in range(subject.MAX_MOVES + 1))
    now = Placement(base=BASE, epoch=1, revision=1, groups={"g1": digests})
    change = change_between(None, now)
    assert change.added is None
    assert not PlacementMirror(MemoryBus(), MemoryStore(), BASE).apply(change)


async def test_a_mirror_that_runs_hears_of_a_change_and_finds_what_it_did_not_hear() -> None:
    store, bus = await a_store(), MemoryBus()
    first = await write(store, None, g1=(A,))
    mirror = PlacementMirror(bus, store, BASE)
    task = asyncio.get_running_loop().create_task(mirror.run())
    await eventually(lambda: known(mirror) == {A: {"g1"}}, "it reads what is there")
    second = await write(store, first, g2=(A,))
    third = await write(store, second, g2=(A, B))
    await bus.publish(subjects.PLACEMENT_EVENTS, change_between(second.placement, third.placement))
    await eventually(lambda: known(mirror) == {A: {"g2"}, B: {"g2"}}, "it reads what it has missed")
    await bus.publish(subjects.PLACEMENT_EVENTS, change_between(None, first.placement))
    task.cancel()
    await asyncio.wait([task])
    assert mirror.revision == 3


async def test_a_mirror_looks_when_it_hears_of_a_store_that_begins_anew() -> None:
    store = await a_store()
    await write(store, await write(store, None, g1=(A,)), g2=(B,))
    mirror = PlacementMirror(MemoryBus(), store, BASE)
    await mirror.look()
    assert mirror.revision == 2
    first = Placement(base=BASE, epoch=1, revision=1, groups={"g3": (B,)})
    assert not mirror.apply(change_between(None, first)), "of revision 1: not what this mirror knows"


async def test_a_mirror_looks_now_and_then_though_it_hears_of_another_base_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject, "REPAIR_S", 0.3)
    store, bus = await a_store(), MemoryBus()
    first = await write(store, None, g1=(A,))
    mirror = PlacementMirror(bus, store, BASE)
    task = asyncio.get_running_loop().create_task(mirror.run())
    await eventually(lambda: known(mirror) == {A: {"g1"}}, "it reads what is there")
    elsewhere = msgspec.structs.replace(change_between(None, first.placement), base=Fingerprint("other"))
    await write(store, first, g2=(A,))  # and nobody hears of it

    async def knows() -> bool:
        await bus.publish(subjects.PLACEMENT_EVENTS, elsewhere)
        return known(mirror) == {A: {"g2"}}

    await eventually(knows, "it looks")
    task.cancel()
    await asyncio.wait([task])


async def test_a_head_that_cannot_be_read_leaves_a_mirror_as_it_was() -> None:
    store = await a_store()
    first = await write(store, None, g1=(A,))
    mirror = PlacementMirror(MemoryBus(), store, BASE)
    await mirror.look()
    await store.put(keys.placement(BASE), {"not": "a head"})
    await mirror.look()
    store.is_connected = False
    await mirror.look()
    assert (mirror.revision, known(mirror)) == (first.placement.revision, {A: {"g1"}})
