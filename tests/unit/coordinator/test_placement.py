"""Which group holds what, by table. What holds for every fleet is in tests/property/test_placement.py."""

import pytest

from infinilora.coordinator.costs import Costs
from infinilora.coordinator.placement import Adapter, Group, Home, Table, by_group, copies_of, place
from infinilora.protocol.ids import Digest, digest_of

A, B, C, D = sorted(digest_of(name.encode()) for name in "abcd")


def table(groups: dict[str, int], adapters: list[Adapter], current: Table | None = None, fill: float = 1.0) -> Table:
    made = [Group(name, size) for name, size in groups.items()]
    return by_group(place(made, adapters, current or {}, fill=fill), made)


def held(*digests: Digest) -> tuple[Digest, ...]:
    return tuple(sorted(digests))


@pytest.mark.parametrize(
    ("name", "groups", "adapters", "current", "wanted"),
    [
        ("nobody to hold anything", {}, [Adapter(A, 1)], {"g1": (A,)}, {}),
        ("one group holds all that fits", {"g1": 10}, [Adapter(A, 4), Adapter(B, 6)], {}, {"g1": held(A, B)}),
        ("the hotter goes first", {"g1": 10}, [Adapter(A, 8, 1.0), Adapter(B, 8, 2.0)], {}, {"g1": (B,)}),
        ("a pin is before heat", {"g1": 10}, [Adapter(A, 8, is_pinned=True), Adapter(B, 8, 9.0)], {}, {"g1": (A,)}),
        (
            "the load is even",
            {"g1": 10, "g2": 12},
            [Adapter(A, 5, 3.0), Adapter(B, 5, 2.0), Adapter(C, 5, 1.0)],
            {},
            {"g1": held(B, C), "g2": (A,)},
        ),
        (
            "what nobody asks for goes where most is free",
            {"g1": 10, "g2": 20},
            [Adapter(A, 5), Adapter(B, 5), Adapter(C, 5)],
            {},
            {"g1": (B,), "g2": held(A, C)},
        ),
        (
            "two that are hot and lie together are parted",
            {"g1": 10, "g2": 10},
            [Adapter(A, 5, 5.0), Adapter(B, 5, 5.0)],
            {"g1": (A, B)},
            {"g1": (B,), "g2": (A,)},
        ),
        (
            "a move that does not pay for its load is not made",
            {"g1": 10, "g2": 10},
            [Adapter(A, 5, 0.001), Adapter(B, 5, 0.001)],
            {"g1": (A, B)},
            {"g1": (A, B), "g2": ()},
        ),
        (
            "a little hotter does not push out what is there",
            {"g1": 5},
            [Adapter(A, 5, 0.001), Adapter(B, 5, 0.0011)],
            {"g1": (A,)},
            {"g1": (A,)},
        ),
        (
            "one that is hotter by enough does",
            {"g1": 5},
            [Adapter(A, 5, 0.001), Adapter(B, 5, 0.0013)],
            {"g1": (A,)},
            {"g1": (B,)},
        ),
        (
            "room is made by what can go elsewhere",
            {"g1": 10, "g2": 4},
            [Adapter(A, 4, 1.0), Adapter(B, 8, 1.0)],
            {"g1": (A,)},
            {"g1": (B,), "g2": (A,)},
        ),
        (
            "a pin that others stand in the way of is not left out",
            {"g1": 10},
            [Adapter(A, 6, 9.0), Adapter(B, 4, 9.0), Adapter(C, 10, is_pinned=True)],
            {"g1": (A, B)},
            {"g1": (C,)},
        ),
        (
            "pins are moved for a pin",
            {"g1": 6, "g2": 4},
            [Adapter(A, 4, is_pinned=True), Adapter(B, 6, is_pinned=True)],
            {"g1": (A,)},
            {"g1": (B,), "g2": (A,)},
        ),
        ("what is at home stays", {"g1": 10, "g2": 99}, [Adapter(A, 5)], {"g1": (A,)}, {"g1": (A,), "g2": ()}),
        ("a lost group's adapters move", {"g2": 10}, [Adapter(A, 5)], {"g1": (A,)}, {"g2": (A,)}),
        (
            "a hotter one may push a colder out of its home",
            {"g1": 10, "g2": 4},
            [Adapter(A, 8, 1.0), Adapter(B, 8, 5.0)],
            {"g1": (A,)},
            {"g1": (B,), "g2": ()},
        ),
        (
            "hot is held twice",
            {"g1": 10, "g2": 10},
            [Adapter(A, 4, 9.0, copies=2), Adapter(B, 4, 1.0)],
            {},
            {"g1": (A,), "g2": held(A, B)},
        ),
        (
            "a second copy never costs another's first",
            {"g1": 4, "g2": 4},
            [Adapter(A, 4, 9.0, copies=2), Adapter(B, 4, 1.0)],
            {},
            {"g1": (A,), "g2": (B,)},
        ),
        ("hot, with one group, is held once", {"g1": 10}, [Adapter(A, 4, 9.0, copies=2)], {}, {"g1": (A,)}),
        ("an outsize adapter is held nowhere", {"g1": 10}, [Adapter(A, 11), Adapter(B, 1)], {}, {"g1": (B,)}),
        ("a removed adapter leaves", {"g1": 10}, [Adapter(B, 1)], {"g1": held(A, B)}, {"g1": (B,)}),
    ],
)
def test_placement(name: str, groups: dict[str, int], adapters: list[Adapter], current: Table, wanted: Table) -> None:
    assert table(groups, adapters, current) == wanted, name


def test_in_a_large_fleet_too_pins_are_moved_for_pins() -> None:
    """Two groups hold two small pins each; each large pin finds room only beside one of them."""
    small, large, rest = ([digest_of(f"{kind}{n}".encode()) for n in range(40)] for kind in ("s", "l", "r"))
    adapters = [Adapter(digest, 4, is_pinned=True) for digest in small[:4]]
    adapters += [Adapter(digest, 6, is_pinned=True) for digest in large[:4]]
    adapters += [Adapter(digest, 1, 1.0) for digest in rest]
    current = {"g0": (*small[:2], rest[0], rest[1]), "g1": tuple(small[2:4])}
    found = table({f"g{n}": 10 for n in range(4)}, adapters, current)
    assert {digest for group in found.values() for digest in group} == {*small[:4], *large[:4]}


def test_in_a_large_fleet_too_the_hotter_push_out_the_colder_and_the_load_stays_even() -> None:
    """Each of 60 that are there is as cold; of 30 that come all are hot and find room by exchange alone."""
    cold, hot = ([digest_of(f"{kind}{n}".encode()) for n in range(60)] for kind in ("cold", "hot"))
    current = {f"g{n}": held(*cold[15 * n : 15 * n + 15]) for n in range(4)}
    adapters = [Adapter(digest, 1, 0.01) for digest in cold] + [Adapter(digest, 1, 1.0) for digest in hot[:30]]
    found = table(dict.fromkeys(current, 15), adapters, current)
    hot_ones = [len(set(digests) & set(hot)) for digests in found.values()]
    assert sum(hot_ones) == 30
    assert max(hot_ones) <= 9


def test_only_the_given_share_of_a_group_is_planned() -> None:
    assert table({"g1": 10}, [Adapter(A, 5), Adapter(B, 5)], fill=0.9) == {"g1": (A,)}


def test_a_second_copy_costs_a_first_that_is_far_colder() -> None:
    found = table({"g1": 4, "g2": 4}, [Adapter(A, 4, 9.0, copies=2), Adapter(B, 4, 0.01)])
    assert found == {"g1": (A,), "g2": (A,)}


def test_the_faster_group_takes_more_of_the_load() -> None:
    groups = [Group("g1", 100, speed=3.0), Group("g2", 100)]
    adapters = [Adapter(digest_of(bytes([n])), 1, 1.0) for n in range(40)]
    found = by_group(place(groups, adapters, {}, fill=1.0), groups)
    assert len(found["g1"]) == pytest.approx(30, abs=2)


def test_the_hot_are_on_the_fast_group_the_rare_and_the_outsize_on_the_slow() -> None:
    """A small fast group beside a large one of an eighth of its speed."""
    groups = [Group("fast", 40, speed=1.0), Group("slow", 400, speed=0.125)]
    hot = [Adapter(digest_of(b"hot%d" % n), 10, 10.0) for n in range(4)]
    rare = [Adapter(digest_of(b"rare%d" % n), 10, 0.01) for n in range(20)]
    outsize = [Adapter(digest_of(b"outsize"), 90, 0.5)]
    found = by_group(place(groups, [*rare, *outsize, *hot], {}, fill=1.0), groups)
    assert set(found["fast"]) == {adapter.digest for adapter in hot}
    assert set(found["slow"]) == {adapter.digest for adapter in (*rare, *outsize)}


def test_copies_are_on_different_hosts() -> None:
    groups = [Group("g1", 99, host="h1"), Group("g2", 99, host="h1"), Group("g3", 10, host="h2")]
    plan = place(groups, [Adapter(A, 5, 9.0, copies=2)], {}, fill=1.0)
    assert "g3" in plan[A].groups
    assert len(plan[A].groups) == 2


def test_more_copies_than_hosts_are_spread_evenly() -> None:
    groups = [Group(f"g{n}", 99, host=f"h{n % 2}") for n in range(6)]
    plan = place(groups, [Adapter(A, 5, 9.0, copies=4)], {}, fill=1.0)
    assert sorted(int(name[1]) % 2 for name in plan[A].groups) == [0, 0, 1, 1]


@pytest.mark.parametrize("state", ["draining", "dead"])
def test_a_group_that_leaves_holds_nothing_and_the_hottest_of_it_find_room_first(state: str) -> None:
    groups = [Group("g1", 99, state=state), Group("g2", 10)]  # type: ignore[arg-type]
    adapters = [Adapter(A, 5, 1.0), Adapter(B, 5, 3.0), Adapter(C, 5, 2.0)]
    plan = place(groups, adapters, {"g1": held(A, B, C)}, fill=1.0)
    assert by_group(plan, groups) == {"g2": held(B, C)}


@pytest.mark.parametrize(
    ("adapter", "sizes", "current", "home"),
    [
        (Adapter(A, 5, 1.0), [10], {"g0": (A,)}, Home(("g0",), "kept")),
        (Adapter(A, 5, 1.0), [10], {}, Home(("g0",), "placed")),
        (Adapter(A, 5, 1.0, copies=2), [10, 10], {"g1": (A,)}, Home(("g1", "g0"), "copied")),
        (Adapter(A, 5, 1.0), [10, 10], {"g0": (A,), "g1": (A,)}, Home(("g0",), "thinned")),
        (Adapter(A, 5, 1.0), [4, 10], {"g0": (A,)}, Home(("g1",), "moved")),
        (Adapter(A, 5, 0.0), [7], {"g0": (D,)}, Home((), "no room")),
        (Adapter(A, 8, 1.0), [7], {}, Home((), "outsize")),
        (Adapter(A, 5, 1.0), [], {}, Home((), "no group")),
    ],
)
def test_every_adapter_has_a_reason(adapter: Adapter, sizes: list[int], current: Table, home: Home) -> None:
    groups = [Group(f"g{number}", size) for number, size in enumerate(sizes)]
    assert place(groups, [adapter, Adapter(D, 5, 9.0)], current, fill=1.0)[A] == home


def test_a_group_without_speed_is_named() -> None:
    with pytest.raises(ValueError, match=r"group g1: found speed 0\.0; wanted one above 0"):
        place([Group("g1", 10, speed=0.0)], [], {}, fill=1.0)


def test_copies_are_counted() -> None:
    assert copies_of({"g1": (A, B), "g2": (A,)}) == {A: 2, B: 1}


@pytest.mark.parametrize(
    ("ratio", "wanted"), [(0, 0), (0.1, 0), (0.5, 0.25), (1, 1), (2, 4), (2.5, 6), (3, 9), (4, 16), (10, 64)]
)
def test_the_square_is_met_where_its_tangents_touch(ratio: float, wanted: float) -> None:
    assert Costs(wait_s=1.0).crowding(3 * ratio, 3.0) == pytest.approx(3 * wanted)


def test_an_adapter_that_nobody_asks_for_leaves_for_nothing_unless_it_is_pinned() -> None:
    costs = Costs(load_s=0.1, load_bytes_per_s=10, horizon_s=100)
    assert costs.leaving(0.0, 9, 1, is_pinned=False) == 0
    assert costs.leaving(0.0, 9, 1, is_pinned=True) == pytest.approx(0.01)
    assert costs.leaving(9.0, 9, 1, is_pinned=False) == pytest.approx(0.01)
