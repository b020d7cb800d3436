"""What is staged before anybody asks, by table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.coordinator.hints import Hint, Pair, over
from infinilora.coordinator.placement import Table
from infinilora.coordinator.prefetch import SLOTS, SPARE, WITHIN_S, Calendar, Prefetched, Room, prefetch
from infinilora.protocol.ids import Digest, digest_of

A, B, C = sorted(digest_of(name.encode()) for name in "abc")
DAY_S = 86_400.0
SLOT_S = DAY_S / SLOTS
ROOMY = {"g1": Room(1000, 1000), "g2": Room(1000, 1000)}
SIZES = {A: 100, B: 200, C: 300}


def stage(group: str, digest: Digest) -> Hint:
    return Hint("stage", group, digest)


def test_what_came_at_this_time_yesterday_is_expected_again() -> None:
    calendar = Calendar(DAY_S)
    calendar.note({A: 9}, 10 * SLOT_S)
    calendar.note({A: 9, B: 18}, 10.5 * SLOT_S)
    calendar.note({C: 1}, 11 * SLOT_S)
    tomorrow = DAY_S + 9.9 * SLOT_S
    assert calendar.expected(tomorrow, 0.2 * SLOT_S) == {A: pytest.approx(18 / SLOT_S), B: pytest.approx(18 / SLOT_S)}
    assert calendar.expected(tomorrow, 0.0) == {}


def test_a_quiet_day_is_remembered_as_quiet() -> None:
    calendar = Calendar(DAY_S)
    calendar.note({A: 9}, 10 * SLOT_S)
    calendar.note({}, 11 * SLOT_S)
    calendar.note({}, 2 * DAY_S + 20 * SLOT_S)
    assert calendar.expected(2 * DAY_S + 20 * SLOT_S, DAY_S - 10 * SLOT_S) == {}


def test_the_busiest_is_staged_first_where_it_is_planned() -> None:
    expected: dict[Digest, float] = {A: 1.0, B: 2.0, C: 3.0}
    table: Table = {"g1": (A,), "g2": (A, B)}
    assert prefetch(expected, table, {}, ROOMY, SIZES, (), 1e9, {}) == [stage("g2", B), stage("g1", A)]


@pytest.mark.parametrize("resident", [{"g1": {A}}, {"other": {A}}])
def test_what_is_somewhere_is_not_fetched_again(resident: dict[str, set[Digest]]) -> None:
    assert not prefetch({A: 1.0}, {"g1": (A,)}, resident, ROOMY, SIZES, (), 1e9, {})


def test_what_is_being_staged_is_not_asked_for_again() -> None:
    assert not prefetch({A: 1.0}, {"g1": (A,)}, {}, ROOMY, SIZES, [("g2", A)], 1e9, {})


def test_nobody_leaves_for_it() -> None:
    """A tenth of the pool stays free."""
    rooms = {"g1": Room(399, 1000)}
    assert not prefetch({C: 1.0}, {"g1": (C,)}, {}, rooms, SIZES, (), 1e9, {})
    assert prefetch({C: 1.0}, {"g1": (C,)}, {}, {"g1": Room(400, 1000)}, SIZES, (), 1e9, {})
    assert not prefetch({C: 1.0}, {"g1": (C,)}, {}, {"g1": Room(499, 1000)}, SIZES, [("g1", A)], 1e9, {})


@pytest.mark.parametrize(
    ("name", "table", "rates", "is_staged"),
    [
        ("what is cold and not to be there may go", {"g1": (C,)}, {C: 1.0}, True),
        ("what nobody asks for may, wherever it is to be", {"g1": (B, C)}, {C: 1.0}, True),
        ("what is to be there and is asked for may not", {"g1": (B, C)}, {B: 0.1, C: 1.0}, False),
        ("nor what is asked for as often", {"g1": (C,)}, {B: 1.0, C: 1.0}, False),
    ],
)
def test_a_full_pool_has_room_where_something_colder_is_left_over(
    name: str, table: Table, rates: dict[Digest, float], *, is_staged: bool
) -> None:
    rooms = {"g1": Room(200, 1000)}
    found = prefetch({C: 1.0}, table, {"g1": {B}}, rooms, SIZES, (), 1e9, rates)
    assert found == ([stage("g1", C)] if is_staged else []), name


def test_bandwidth_bounds_what_is_under_way() -> None:
    expected: dict[Digest, float] = {A: 3.0, B: 2.0, C: 1.0}
    table: Table = {"g1": (A, B, C)}
    assert prefetch(expected, table, {}, ROOMY, SIZES, (), 150.0, {}) == [stage("g1", A), stage("g1", B)]
    assert not prefetch(expected, table, {}, ROOMY, SIZES, (), 0.0, {})


def test_what_has_become_of_it_is_counted_once() -> None:
    """A was there when it was asked for, B on its way; C left without having been asked for; D is there still."""
    d = digest_of(b"d")
    prefetched = Prefetched()
    prefetched.begun({("g1", one) for one in (A, B, C, d)})
    assert not prefetched.look({"g1": set()}, set(), {("g1", one) for one in (A, B, C, d)})
    assert not prefetched.look({"g1": {A, C, d}}, set(), {("g1", B)})
    assert prefetched.num_there == 3
    assert prefetched.look({"g1": {A, B, C, d}}, {A, B}, set()) == {"used": 1, "late": 1}
    assert prefetched.look({"g1": {d}}, {A, B}, set()) == {"unused": 1}
    assert not prefetched.look({"g1": {d}}, {A, B}, set())
    assert prefetched.look({}, set(), set()) == {"unused": 1}


def test_what_nobody_has_taken_up_is_not_counted() -> None:
    prefetched = Prefetched()
    prefetched.begun({("g1", A)})
    assert not prefetched.look({"g1": set()}, set(), set())
    assert not prefetched.look({"g1": set()}, {A}, set())


MANY = tuple(digest_of(b"%d" % number) for number in range(8))
GROUPS = ("g1", "g2")
SOME = st.frozensets(st.sampled_from(MANY))
RATES = st.dictionaries(st.sampled_from(MANY), st.floats(0.001, 10.0))


@given(
    expected=RATES,
    table=st.fixed_dictionaries({group: SOME.map(lambda held: tuple(sorted(held))) for group in GROUPS}),
    resident=st.fixed_dictionaries(dict.fromkeys(GROUPS, SOME)),
    free=st.integers(0, 1000),
    sizes=st.fixed_dictionaries({digest: st.integers(1, 300) for digest in MANY}),
    under_way=st.frozensets(st.tuples(st.sampled_from(GROUPS), st.sampled_from(MANY)), max_size=3),
    bytes_per_s=st.floats(0, 500),
    rates=RATES,
)
def test_whatever_is_expected_it_is_within_room_and_bandwidth_and_once_where_it_is_to_be(
    expected: dict[Digest, float],
    table: Table,
    resident: dict[str, frozenset[Digest]],
    free: int,
    sizes: dict[Digest, int],
    under_way: frozenset[Pair],
    bytes_per_s: float,
    rates: dict[Digest, float],
) -> None:
    rooms = {group: Room(free, 1000) for group in GROUPS}
    found = prefetch(expected, table, resident, rooms, sizes, under_way, bytes_per_s, rates)
    assert found == prefetch(
        dict(reversed(expected.items())), table, resident, rooms, sizes, under_way, bytes_per_s, rates
    )
    staged = [hint.digest for hint in found]
    assert len(staged) == len(set(staged))
    assert not set(staged) & (resident["g1"] | resident["g2"] | {digest for _, digest in under_way})
    for group in GROUPS:
        new = [hint.digest for hint in found if hint.group == group]
        assert set(new) <= set(table[group]) & expected.keys()
        if new:
            taken = sum(sizes[digest] for digest in new)
            others = sum(sizes[digest] for at, digest in under_way if at == group)
            colder = {one for digest in new for one in over(group, digest, table, resident, rates)}
            assert taken + others <= bytes_per_s * WITHIN_S + 1e-6
            assert taken + others <= free - SPARE * 1000 + sum(sizes[one] for one in colder)


@given(st.lists(st.tuples(SOME, SOME, SOME, SOME), max_size=20))
def test_whatever_happens_to_what_was_staged_it_has_one_outcome_at_most(
    looks: list[tuple[frozenset[Digest], ...]],
) -> None:
    """Begun at once; then, look by look: begun more, there, asked for, under way."""
    prefetched, begun, told = Prefetched(), 0, 0
    for new, there, asked_for, under_way in looks:
        prefetched.begun({("g1", digest) for digest in new})
        begun += len(new)
        seen = prefetched.look({"g1": there}, asked_for, {("g1", digest) for digest in under_way})
        told += seen.total()
        assert told <= begun
    told += prefetched.look({}, frozenset(), frozenset()).total()
    assert told <= begun
    assert not prefetched.look({}, frozenset(MANY), frozenset()), "nothing is left open"
