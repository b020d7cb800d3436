from dataclasses import replace

import pytest

from infinilora.engine.lora.choose import Group, choose_group
from infinilora.protocol.ids import Digest

D = Digest("sha256:d")


def group(name: str, bytes_free: int, *resident: Digest, leases: int = 0) -> Group:
    return Group(
        name=name, address="", incarnation="", bytes_free=bytes_free, leases=leases, resident=frozenset(resident)
    )


@pytest.mark.parametrize(
    ("groups", "placed", "excluded", "chosen"),
    [
        ([], (), (), None),
        ([group("a", 1), group("b", 2)], (), (), "b"),
        ([group("a", 1, D), group("b", 2)], (), (), "a"),
        ([group("a", 1, D), group("b", 2)], ("b",), (), "a"),
        ([group("a", 1, D), group("b", 2, D)], ("a",), (), "a"),
        ([group("a", 1), group("b", 2)], ("gone",), (), "b"),
        ([group("a", 1), group("b", 2), group("c", 3)], ("a", "b"), (), "b"),
        ([group("a", 1), group("b", 2, leases=9), group("c", 3)], ("a", "b"), (), "a"),
        ([group("a", 1, D, leases=9), group("b", 2)], ("a", "b"), (), "a"),
        ([group("a", 1), group("b", 2)], ("b",), ("b",), "a"),
        ([group("a", 1)], ("a",), ("a",), None),
        ([group("a", 5), group("b", 5)], (), (), "b"),
    ],
)
def test_where_it_is_beats_where_it_is_wanted_beats_load_beats_free_bytes(
    groups: list[Group], placed: tuple[str, ...], excluded: tuple[str, ...], chosen: str | None
) -> None:
    assert choose_group(D, groups, placed, excluded) == chosen
    assert choose_group(D, reversed(groups), placed, excluded) == chosen, "the order they beat in decides nothing"


def unlike(name: str, rows_per_s: float, *resident: Digest, leases: int = 0, bytes_free: int = 1) -> Group:
    there = group(name, bytes_free, *resident, leases=leases)
    return replace(there, rows_per_s=rows_per_s)


FAST, SLOW = 4000.0, 1000.0


@pytest.mark.parametrize(
    ("groups", "placed", "chosen"),
    [
        # wanted of both, or of any: as many leases for its speed
        ([unlike("fast", FAST), unlike("slow", SLOW, bytes_free=9)], ("fast", "slow"), "fast"),
        ([unlike("fast", FAST), unlike("slow", SLOW, bytes_free=9)], None, "fast"),
        ([unlike("fast", FAST, leases=2), unlike("slow", SLOW)], ("fast", "slow"), "fast"),
        ([unlike("fast", FAST, leases=4), unlike("slow", SLOW)], ("fast", "slow"), "slow"),
        ([unlike("fast", FAST, D), unlike("slow", SLOW, D)], (), "fast"),
        # where it is, or is wanted, counts before speed
        ([unlike("fast", FAST), unlike("slow", SLOW, D)], None, "slow"),
        ([unlike("fast", FAST), unlike("slow", SLOW)], ("slow",), "slow"),
        # nowhere in the plan: rare or outsize
        ([unlike("fast", FAST, bytes_free=9), unlike("slow", SLOW)], (), "slow"),
        ([unlike("fast", FAST, leases=1), unlike("slow", SLOW, leases=1)], (), "slow"),
        ([unlike("fast", FAST), unlike("slow", SLOW, leases=1)], (), "fast"),
        # alike but for noise, or not told: as if there were no speeds
        ([unlike("a", 1300.0), unlike("b", 1000.0, bytes_free=9)], ("a", "b"), "b"),
        ([unlike("a", 1000.0), unlike("b", 1300.0, bytes_free=9)], (), "b"),
        ([unlike("a", 0.0), unlike("b", SLOW, bytes_free=9)], None, "b"),
    ],
)
def test_often_asked_for_goes_to_the_fast_and_what_has_no_place_to_the_slow(
    groups: list[Group], placed: tuple[str, ...] | None, chosen: str
) -> None:
    assert choose_group(D, groups, placed) == chosen
    assert choose_group(D, reversed(groups), placed) == chosen
