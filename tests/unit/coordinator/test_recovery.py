"""How long a death is felt, on a clock of the test's."""

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
