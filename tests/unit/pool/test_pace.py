"""How fast loads may go, by hand; and that a pool's loads keep to it while others are served."""

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from typing_extensions import override

from infinilora.pool.pace import QUIET_AFTER_S, Pace
from infinilora.pool.pool import AdapterPool, LeaseState, PoolConfig
from infinilora.protocol.shards import Shape
from infinilora.runtime.blobs import DirectoryBlobs
from support.cards import make_card
from support.pools import DefinedKernels, Packed, Told, pack
from support.sharded_pools import GroupOfPools

MB = 1_000_000
CARD = make_card("llama", num_layers=3)


def test_nobody_waits_while_nobody_is_served() -> None:
    pace = Pace(0.05)
    assert pace.pause_s(MB, 0.001, 0.0, total_bytes=MB) == 0
    pace.stepped(1.0)
    assert pace.pause_s(MB, 0.001, 1.001 + QUIET_AFTER_S, total_bytes=MB) == 0


def test_a_load_gets_its_share_of_what_loading_brings() -> None:
    pace = Pace(0.05)
    pace.stepped(10.0)
    assert pace.pause_s(MB, 0.001, 10.0, total_bytes=MB) == pytest.approx(0.02), "1 ms of work, then 20 ms at 5 %"


def test_all_loads_share_one_bucket() -> None:
    pace = Pace(0.05)
    pace.stepped(10.0)
    pauses = [pace.pause_s(MB, 0.001, 10.0, total_bytes=MB) for _ in range(4)]
    assert pauses == pytest.approx([0.02, 0.04, 0.06, 0.08])
    pace.stepped(10.05)
    assert pace.pause_s(MB, 0.001, 10.05, total_bytes=MB) == pytest.approx(0.05), "what was owed is paid by time"


def test_what_was_owed_is_forgotten_when_nobody_is_served_any_more() -> None:
    pace = Pace(0.05)
    pace.stepped(10.0)
    for _ in range(50):
        pace.pause_s(MB, 0.001, 10.0, total_bytes=MB)
    assert pace.pause_s(MB, 0.001, 10.5, total_bytes=MB) == 0
    pace.stepped(10.5)
    assert pace.pause_s(MB, 0.001, 10.5, total_bytes=MB) == pytest.approx(0.02)


def test_a_load_is_stretched_to_a_bound_and_a_layer_without_bytes_never() -> None:
    pace = Pace(0.05, most_stretched_s=2.0)
    pace.stepped(0.0)
    assert pace.pause_s(0, 0.001, 0.0, total_bytes=100 * MB) == 0
    assert pace.pause_s(10 * MB, 1.0, 0.0, total_bytes=100 * MB) == pytest.approx(0.2), (
        "a tenth of it in a tenth of 2 s"
    )


def test_a_share_of_one_never_waits() -> None:
    pace = Pace(1.0)
    pace.stepped(0.0)
    assert pace.pause_s(MB, 0.001, 0.0, total_bytes=MB) == 0


class Recorded(Pace):
    """Keeps what it told. Once there was a step, no time passes for it: a slow machine serves on."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace.share, most_stretched_s=0.9)
        self.rests: list[float] = []
        self.spent_s: list[float] = []

    @override
    def pause_s(self, num_bytes: int, seconds: float, now: float, *, total_bytes: int) -> float:
        rest = super().pause_s(num_bytes, seconds, max(self._stepped_s, 0.0) or now, total_bytes=total_bytes)
        self.rests.append(rest)
        self.spent_s.append(seconds)
        return rest


class House:
    """A pool whose loads may take a thousandth of a core while others are served, and 0.9 s at most."""

    def __init__(self, work: Path) -> None:
        blobs = DirectoryBlobs(work / "store")
        self.packed: list[Packed] = [pack(work, blobs, CARD, seed=seed) for seed in range(2)]
        config = PoolConfig(
            base=CARD.fingerprint,
            num_layers=CARD.num_layers,
            capacity_bytes=4 << 20,
            num_slots=4,
            cache_dir=work / "cache",
            cache_bytes=1 << 20,
            load_share=0.001,
        )
        self.deaths: list[BaseException] = []
        self.pool = AdapterPool(config, blobs, DefinedKernels(), on_death=self.deaths.append)
        self.pool._pace = self.pool._loader._pace = self.pace = Recorded(self.pool._pace)

    def load(self, number: int) -> tuple[int, list[float]]:
        """The slot, and how many seconds the load was told to rest after each layer."""
        told, num_before = Told(), len(self.pace.rests)
        self.pool.lease("engine", self.packed[number].digest, told)
        return told.resident().slot, self.pace.rests[num_before:]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.pool.close()
    assert not house.deaths


def test_a_load_goes_slowly_while_a_resident_adapter_is_served(house: House) -> None:
    slot, idle = house.load(0)
    grants = house.pool.grants("engine")
    grants.stepped([slot])
    _, served = house.load(1)
    assert idle
    assert not any(idle), "an idle pool loads as fast as it can"
    assert sum(rest > 0 for rest in served) >= CARD.num_layers - 1, "it rests after all layers but the last"


def test_steps_of_an_adapter_that_loads_do_not_slow_its_load(house: House) -> None:
    told, grants = Told(), house.pool.grants("engine")

    def told_and_used(state: LeaseState) -> None:
        if not state.is_resident:
            grants.stepped([state.slot, 3, -1, 99])
        told(state)

    house.pool.lease("engine", house.packed[0].digest, told_and_used)
    told.resident()
    assert not any(house.pace.rests)
    assert len([s for s in told.states if s.is_admissible and not s.is_resident]) > 0


def test_loads_of_a_shard_that_follows_go_slowly_while_what_is_whole_there_is_served(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path / "store")
    packed = [pack(tmp_path, blobs, CARD, seed=seed) for seed in range(2)]
    group = GroupOfPools(CARD, Shape(1, 2), blobs, tmp_path, load_share=0.001)
    follower = group.followers[1]
    follower._pace = follower._loader._pace = pace = Recorded(follower._loader._pace)

    def load(number: int) -> tuple[int, list[float]]:
        told, num_before = Told(), len(pace.rests)
        group.head.lease("engine", packed[number].digest, told)
        return told.resident().slot, pace.rests[num_before:]

    slot, idle = load(0)
    group.grants(1).stepped([99, slot])
    _, served = load(1)
    group.close()
    assert idle
    assert not any(idle)
    assert any(served)


def test_a_load_pays_for_its_processor_time_and_opening_it_is_paid_with_the_first_layer(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    house.load(0)
    assert house.pace.spent_s[: CARD.num_layers] == [2.0, 1.0, 1.0]
