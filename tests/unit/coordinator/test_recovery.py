"""How long a death is felt, on a clock of the test's."""

from hypothesis import given
from hypothesis import strategies as st

from infinilora.coordinator.recovery import Recovery
from infinilora.protocol.ids import Digest

A, B, COLD = Digest("sha256:a"), Digest("sha256:b"), Digest("sha256:c")
HOT = frozenset({A, B})


def test_it_is_over_when_all_that_is_asked_for_is_somewhere_again() -> None:
    recovery = Recovery()
    recovery.look({"g1": {A, B, COLD}, "g2": set()}, {}, HOT, 9)
    dead = {"g1": 10.0}
    assert recovery.look({"g2": set()}, dead, HOT, 11.5) == {}
    assert recovery.missed == HOT
    assert recovery.look({"g2": {B}}, dead, HOT, 12) == {}
    assert recovery.missed == {A}
    assert recovery.look({"g2": {A}}, dead, HOT, 12.5) == {"g1": 2.5}
    assert recovery.look({"g2": set()}, dead, HOT, 13) == {}, "it is told once"


def test_what_others_had_is_missed_by_nobody() -> None:
    recovery = Recovery()
    recovery.look({"g1": {A}, "g2": {A}}, {}, HOT, 9)
    assert recovery.look({"g2": {A}}, {"g1": 10.0}, HOT, 11.5) == {"g1": 1.5}


def test_what_nobody_asks_for_any_more_is_not_missed() -> None:
    recovery = Recovery()
    recovery.look({"g1": {A}, "g2": set()}, {}, HOT, 9)
    assert recovery.look({"g2": set()}, {"g1": 10.0}, HOT, 11) == {}
    assert recovery.look({"g2": set()}, {"g1": 10.0}, frozenset(), 12) == {"g1": 2.0}


def test_a_group_that_left_in_order_is_no_loss() -> None:
    recovery = Recovery()
    recovery.look({"g1": {A}, "g2": set()}, {}, HOT, 9)
    assert recovery.look({"g2": set()}, {}, HOT, 10) == {}
    assert recovery.missed == frozenset()


def test_a_group_may_come_back_itself_and_die_again() -> None:
    recovery = Recovery()
    recovery.look({"g1": {A}}, {}, HOT, 9)
    assert recovery.look({}, {"g1": 10.0}, HOT, 11) == {}
    assert recovery.look({"g1": {A}}, {}, HOT, 15) == {"g1": 5.0}
    assert recovery.look({}, {"g1": 20.0}, HOT, 22) == {}
    assert recovery.look({"g1": {A}}, {}, HOT, 23) == {"g1": 3.0}


HELD = st.frozensets(st.sampled_from([A, B, COLD]))
ROUNDS = st.lists(st.tuples(st.dictionaries(st.sampled_from(["g1", "g2", "g3"]), HELD), HELD), max_size=20)


@given(ROUNDS)
def test_whoever_dies_and_returns_each_death_is_told_once_and_nothing_that_is_there_is_missed(
    rounds: list[tuple[dict[str, frozenset[Digest]], frozenset[Digest]]],
) -> None:
    """Round by round: who is there with what, and what is asked for. Who was there and is not has died."""
    recovery, deaths, told = Recovery(), 0, 0
    dead: dict[str, float] = {}
    before: set[str] = set()
    for now, (resident, wanted) in enumerate(rounds):
        died = before - resident.keys()
        deaths += len(died)
        dead = {group: at for group, at in dead.items() if group not in resident} | dict.fromkeys(died, now - 1.0)
        over = recovery.look(resident, dead, wanted, float(now))
        told += len(over)
        assert all(seconds >= 1.0 for seconds in over.values())
        assert recovery.missed <= wanted - frozenset().union(*resident.values())
        before = set(resident)
    told_at_last = recovery.look({}, dict.fromkeys(before, 0.0), frozenset(), 99.0)
    assert not recovery.missed
    assert told <= deaths
    assert told_at_last.keys() >= before
