"""Of which layers a word is said while an adapter loads; and that a load alone wakes nobody as it goes."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from infinilora.pool.config import PoolConfig
from infinilora.pool.pool import AdapterPool
from infinilora.pool.telling import PARTS, is_worth_telling
from infinilora.protocol.shards import Shape
from infinilora.runtime.blobs import DirectoryBlobs
from support.cards import make_card
from support.pools import DefinedKernels, Told, pack
from support.scaled import pack_scaled
from support.sharded_pools import GroupOfPools

DEEP = make_card("llama", num_layers=30, hidden=16, intermediate=16)


def told_of(num_layers: int) -> list[int]:
    """Counts that are told, of layers that come one by one."""
    told = [0]
    for count in range(1, num_layers + 1):
        if is_worth_telling(told[-1], count, num_layers):
            told.append(count)
    return told[1:]


def test_the_first_layers_are_told_one_by_one_and_later_ones_in_parts() -> None:
    assert told_of(31) == [1, 2, 3, 4, 6, 9, 13, 17, 21, 25, 29, 31]
    assert told_of(81) == [1, 2, 3, 4, 6, 9, 13, 19, 28, 39, 50, 61, 72, 81]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 9, 31, 81, 200])
def test_the_first_and_the_last_are_told_and_never_much_is_left_untold(num_layers: int) -> None:
    told = told_of(num_layers)
    assert (told[0], told[-1]) == (1, num_layers)
    assert all(after - before <= -(-num_layers // PARTS) for before, after in pairwise(told))


def test_layers_that_come_at_once_are_told_at_once_and_none_twice() -> None:
    assert is_worth_telling(0, 7, 31)
    assert not is_worth_telling(7, 7, 31)
    assert not is_worth_telling(7, 0, 31)
    assert is_worth_telling(31, 31, 31), "whoever is told of all of them asked for it"


class House:
    """A pool of a deep base."""

    def __init__(self, work: Path) -> None:
        self.blobs = DirectoryBlobs(work / "store")
        self.digest = pack(work, self.blobs, DEEP, seed=1).digest
        config = PoolConfig(
            base=DEEP.fingerprint,
            num_layers=DEEP.num_layers,
            capacity_bytes=16 << 20,
            num_slots=4,
            cache_dir=work / "cache",
            cache_bytes=0,
        )
        self.deaths: list[BaseException] = []
        self.pool = AdapterPool(config, self.blobs, DefinedKernels(), on_death=self.deaths.append)

    def count_wakes(self) -> list[int]:
        """How many threads of the loader each call is to wake from now on."""
        woken = list[int]()
        for lane in self.pool._loader._lanes:
            notify = lane.idle.notify

            def counted(n: int = 1, notify: Callable[[int], None] = notify) -> None:
                woken.append(n)
                notify(n)

            lane.idle.notify = counted  # type: ignore[method-assign]
        return woken

    def load(self) -> list[int]:
        """The counts of layers that were told."""
        told = Told()
        self.pool.lease("engine", self.digest, told)
        told.resident()
        return [state.layers_ready for state in told.states]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.pool.close()
    assert not house.deaths


def test_a_pool_tells_a_deep_adapter_in_parts(house: House) -> None:
    assert [count for count in house.load() if count] == told_of(DEEP.num_layers + 1)


def test_a_load_that_is_alone_wakes_no_thread_between_its_layers(house: House) -> None:
    """One is woken as it is asked for, one as it goes to the store, one as it is given its memory."""
    woken = house.count_wakes()
    house.load()
    assert sum(woken) <= 3


def test_a_shard_that_follows_tells_its_head_in_parts_and_every_scale_of_each(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path / "store")
    scaled = pack_scaled(tmp_path, blobs, DEEP, seed=1, targets=["q_proj", "down_proj"])
    group, told = GroupOfPools(DEEP, Shape(1, 2), blobs, tmp_path), Told()
    group.head.lease("engine", scaled.digest, told)
    state = told.resident()
    group.close()
    assert {(scale.layer, scale.site) for scale in state.scales} == scaled.factors.keys()
    counts = [state.layers_ready for state in told.states if state.layers_ready]
    assert counts == sorted(set(counts))
    assert len(counts) <= len(told_of(DEEP.num_layers + 1))
