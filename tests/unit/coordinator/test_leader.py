"""One leader at a time, each with a higher epoch; on a clock of the test's."""

import pytest

from infinilora.coordinator.leader import Leadership
from infinilora.protocol import keys
from infinilora.runtime.memory import MemoryStore

LEASE_S = 3.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def candidate(store: MemoryStore, clock: Clock, owner: str) -> Leadership:
    return Leadership(store, owner, lease_s=LEASE_S, clock=clock)


async def test_the_first_leads_and_the_second_stands_by(store: MemoryStore, clock: Clock) -> None:
    first, second = candidate(store, clock, "c1/a"), candidate(store, clock, "c2/b")
    await first.step()
    await second.step()
    assert (first.is_leading, first.epoch, first.leader) == (True, 1, "c1/a")
    assert (second.is_leading, second.epoch, second.leader) == (False, 1, "c1/a")


async def test_a_leader_that_renews_stays(store: MemoryStore, clock: Clock) -> None:
    first, second = candidate(store, clock, "c1/a"), candidate(store, clock, "c2/b")
    await first.step()
    for _ in range(10):
        clock.now += LEASE_S / 2
        await first.step()
        await second.step()
        assert first.is_leading
        assert not second.is_leading
    assert first.epoch == 1


async def test_a_standby_takes_over_with_a_higher_epoch(store: MemoryStore, clock: Clock) -> None:
    first, second = candidate(store, clock, "c1/a"), candidate(store, clock, "c2/b")
    await first.step()
    clock.now += LEASE_S + 0.1
    await second.step()
    assert (second.is_leading, second.epoch) == (True, 2)
    assert not first.is_leading
    await first.step()
    assert (first.is_leading, first.epoch, first.leader) == (False, 2, "c2/b")


async def test_a_leader_knows_by_its_own_clock_that_its_lease_may_be_over(store: MemoryStore, clock: Clock) -> None:
    first = candidate(store, clock, "c1/a")
    await first.step()
    store.is_connected = False
    clock.now += LEASE_S - 0.1
    await first.step()
    assert first.is_leading
    clock.now += 0.2
    assert not first.is_leading
    await first.step()
    assert first.leader is None


async def test_a_leader_comes_back_after_the_store_does(store: MemoryStore, clock: Clock) -> None:
    first = candidate(store, clock, "c1/a")
    await first.step()
    store.is_connected = False
    clock.now += 2 * LEASE_S
    await first.step()
    store.is_connected = True
    await first.step()
    assert (first.is_leading, first.epoch) == (True, 2)


async def test_a_new_life_does_not_inherit_the_old_lease(store: MemoryStore, clock: Clock) -> None:
    await candidate(store, clock, "c1/old").step()
    new = candidate(store, clock, "c1/new")
    await new.step()
    assert not new.is_leading


async def test_resigning_lets_the_next_in_at_once(store: MemoryStore, clock: Clock) -> None:
    first, second = candidate(store, clock, "c1/a"), candidate(store, clock, "c2/b")
    await first.step()
    await first.resign()
    assert not first.is_leading
    await second.step()
    assert second.is_leading
    await first.resign()
    assert await store.lease(keys.LEADER) == ("c2/b", 2)


async def test_a_store_that_was_emptied_does_not_begin_at_1_again(store: MemoryStore, clock: Clock) -> None:
    first, second = candidate(store, clock, "c1/a"), candidate(store, clock, "c2/b")
    for _ in range(4):
        await first.step()
        await first.resign()
    await first.step()
    await second.step()
    store.empty()
    await second.step()
    assert (second.holding, await store.counter(keys.EPOCH)) == (6, 6)
    await first.step()
    assert (first.is_leading, first.leader) == (False, "c2/b")


async def test_one_that_never_saw_the_lost_epochs_is_beyond_them_after_a_few_refusals(
    store: MemoryStore, clock: Clock
) -> None:
    first, seen = candidate(store, clock, "c1/a"), 1000
    refused = 0
    while True:
        await first.step()
        if (first.holding or 0) > seen:
            break
        refused += 1
        await first.deposed()
    assert refused == 9


async def test_who_was_deposed_by_another_leader_leaves_the_epochs_alone(store: MemoryStore, clock: Clock) -> None:
    first, second = candidate(store, clock, "c1/a"), candidate(store, clock, "c2/b")
    for _ in range(4):
        await first.step()
        await first.resign()
    await first.step()
    await store.release_lease(keys.LEADER, "c1/a", 5)
    await second.step()
    await first.deposed()
    await second.resign()
    await first.step()
    assert first.holding == 7
