"""From a plan to a table, by example and over random histories; what groups are asked, on a clock of the test's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.coordinator.hints import Hint, Pair
from infinilora.coordinator.moves import Attempts, table
from infinilora.coordinator.placement import Table
from infinilora.protocol.ids import Digest

A, B = Digest("sha256:a"), Digest("sha256:b")
STAGE_A = Hint("stage", "g1", A)


def held(*g1: Digest, g2: tuple[Digest, ...] = ()) -> dict[str, frozenset[Digest]]:
    return {"g1": frozenset(g1), "g2": frozenset(g2)}


@pytest.mark.parametrize(
    ("name", "plan", "told", "resident", "failed", "wanted"),
    [
        ("what is planned is told", {"g1": (A,), "g2": ()}, {}, held(), (), {"g1": (A,), "g2": ()}),
        (
            "a move begins with both",
            {"g1": (), "g2": (A,)},
            {"g1": (A,), "g2": ()},
            held(A),
            (),
            {"g1": (A,), "g2": (A,)},
        ),
        (
            "and ends when the new one has it",
            {"g1": (), "g2": (A,)},
            {"g1": (A,), "g2": (A,)},
            held(A, g2=(A,)),
            (),
            {"g1": (), "g2": (A,)},
        ),
        (
            "what is not resident is not waited for",
            {"g1": (), "g2": (A,)},
            {"g1": (A,), "g2": ()},
            held(),
            (),
            {"g1": (), "g2": (A,)},
        ),
        (
            "nor what nobody asks for",
            {"g1": (), "g2": (B,)},
            {"g1": (B,), "g2": ()},
            held(B),
            (),
            {"g1": (), "g2": (B,)},
        ),
        ("what has no place is let go", {"g1": (), "g2": ()}, {"g1": (A,)}, held(A), (), {"g1": (), "g2": ()}),
        (
            "a failed move is rolled back",
            {"g1": (), "g2": (A,)},
            {"g1": (A,), "g2": (A,)},
            held(A),
            (("g2", A),),
            {"g1": (A,), "g2": ()},
        ),
        (
            "a failure with no other home stays",
            {"g1": (A,), "g2": ()},
            {},
            held(),
            (("g1", A),),
            {"g1": (A,), "g2": ()},
        ),
        ("a group that is emptied goes when it is empty", {"g2": (A,)}, {"g1": ()}, held(), (), {"g2": (A,)}),
        ("and not before", {"g2": (A,)}, {"g1": (A,)}, held(A), (), {"g1": (A,), "g2": (A,)}),
        ("a dead group is not waited for", {"g2": (A,)}, {"g1": (A,)}, {"g2": frozenset()}, (), {"g2": (A,)}),
    ],
)
def test_a_table(
    name: str, plan: Table, told: Table, resident: dict[str, frozenset[Digest]], failed: tuple[Pair, ...], wanted: Table
) -> None:
    assert table(plan, told, resident, {A}, set(failed)) == wanted, name


GROUPS = ("g1", "g2", "g3")
DIGESTS = tuple(Digest(f"sha256:{n}") for n in range(5))
some = st.dictionaries(st.sampled_from(GROUPS), st.sets(st.sampled_from(DIGESTS)))
pairs = st.sets(st.tuples(st.sampled_from(GROUPS), st.sampled_from(DIGESTS)))


def as_table(sets: dict[str, set[Digest]]) -> Table:
    return {group: tuple(sorted(digests)) for group, digests in sets.items()}


@given(some, some, some, st.sets(st.sampled_from(DIGESTS)), pairs)
def test_whoever_had_a_place_that_serves_and_is_to_have_one_has_one(
    planned: dict[str, set[Digest]],
    told: dict[str, set[Digest]],
    resident: dict[str, set[Digest]],
    wanted: set[Digest],
    failed: set[Pair],
) -> None:
    now = table(as_table(planned), as_table(told), resident, wanted, failed)
    assert set(now) <= set(resident), "only groups that can be given work"
    for digest in DIGESTS:
        places = {group for group, digests in now.items() if digest in digests}
        there = {group for group in resident if digest in resident[group]}
        on_plan = {group for group in resident if digest in planned.get(group, ())}
        was_there = {group for group in there if digest in told.get(group, ())}
        assert places <= on_plan | was_there, "nothing is where neither the plan nor the past has it"
        assert bool(places) == bool(on_plan), "planned at all: told somewhere"
        if digest in wanted and was_there and on_plan and not failed & {(g, digest) for g in GROUPS}:
            assert places & there, "what could be computed with can be"


def attempts() -> Attempts:
    return Attempts(move_s=30, pause_s=10, max_under_way=2)


def test_a_hint_is_given_again_after_a_pause_for_as_long_as_it_takes() -> None:
    asked = attempts()
    given_at = []
    for now in range(0, 29, 1):
        asked.look(held(), now)
        if asked.take([STAGE_A], now):
            given_at.append(now)
    assert given_at == [0, 10, 20]


def test_a_group_is_asked_for_so_many_at_a_time_and_for_more_when_they_are_there() -> None:
    asked = attempts()
    wanted = [Hint("stage", "g1", digest) for digest in DIGESTS] + [Hint("stage", "g2", A)]
    assert asked.take(wanted, 0) == [*wanted[:2], wanted[-1]]
    asked.look({"g1": {DIGESTS[0]}, "g2": set()}, 1)
    assert asked.take(wanted[1:], 1) == [wanted[2]]


def test_what_does_not_come_has_failed_for_a_while() -> None:
    asked = attempts()
    asked.take([STAGE_A], 0)
    asked.look(held(), 29.9)
    assert not asked.failed
    asked.look(held(), 30)
    assert asked.failed == {("g1", A)}
    asked.look(held(), 329)
    assert asked.failed
    asked.look(held(), 330)
    assert not asked.failed


def test_what_came_in_time_has_not_failed_though_it_went_again() -> None:
    asked = attempts()
    asked.take([STAGE_A], 0)
    asked.look(held(A), 5)
    asked.look(held(), 40)
    assert not asked.failed


def test_a_group_that_is_gone_has_not_failed() -> None:
    asked = attempts()
    asked.take([STAGE_A], 0)
    asked.look({}, 5)
    asked.look(held(), 40)
    assert not asked.failed


def test_a_life_that_did_not_answer_is_left_alone_for_a_pause_and_no_other() -> None:
    asked, others = attempts(), Hint("stage", "g2", A)
    asked.unanswered("g1", "x", 0)
    asked.look(held(), 9.9)
    assert asked.take([STAGE_A, others], 9.9, {"g1": "x", "g2": "x"}) == [others]
    assert asked.take([STAGE_A], 9.9, {"g1": "y"}) == [STAGE_A]
    asked.unanswered("g1", "y", 10)
    asked.look(held(), 20)
    assert asked.take([STAGE_A], 20, {"g1": "y"}) == [STAGE_A]


def test_a_command_that_was_not_taken_counts_for_nothing() -> None:
    asked = attempts()
    asked.take([STAGE_A], 0)
    asked.refused(STAGE_A)
    asked.look(held(), 40)
    assert not asked.failed
