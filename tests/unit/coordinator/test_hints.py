"""What LoRA servers are asked to do, by table."""

import pytest

from infinilora.coordinator.hints import Hint, hints, over
from infinilora.coordinator.placement import Table
from infinilora.protocol.ids import Digest, digest_of

A, B, C, D, E = sorted(digest_of(name.encode()) for name in "abcde")
TABLE: Table = {"g1": (A, B), "g2": (A, C)}
KNOWN = frozenset({A, B, C})
EMPTY: dict[str, frozenset[Digest]] = {"g1": frozenset(), "g2": frozenset()}


@pytest.mark.parametrize(
    ("name", "resident", "heat", "wanted"),
    [
        ("no heat, nothing to do", EMPTY, {}, []),
        ("heat and nowhere: stage, hottest first", EMPTY, {B: 1.0, C: 2.0}, [("g2", C), ("g1", B)]),
        ("resident where it is to be: nothing", {"g1": frozenset({B}), "g2": frozenset()}, {B: 1.0}, []),
        ("resident elsewhere: it moves", {"g1": frozenset(), "g2": frozenset({B})}, {B: 1.0}, [("g1", B)]),
        ("of two copies both are wanted", EMPTY, {A: 9.0}, [("g1", A), ("g2", A)]),
        ("a second copy", {"g1": frozenset({A}), "g2": frozenset()}, {A: 9.0}, [("g2", A)]),
        (
            "a first copy is before another's second",
            {"g1": frozenset({A}), "g2": frozenset()},
            {A: 9.0, B: 0.1},
            [("g1", B), ("g2", A)],
        ),
        ("not in the table: not staged", EMPTY, {D: 5.0}, []),
        ("a group that cannot be asked is not", {"g2": frozenset()}, {B: 1.0, C: 0.5}, [("g2", C)]),
    ],
)
def test_stage(
    name: str,
    resident: dict[str, frozenset[Digest]],
    heat: dict[Digest, float],
    wanted: list[tuple[str, Digest]],
) -> None:
    found = hints(TABLE, resident, heat, KNOWN)
    assert found == [Hint("stage", group, digest) for group, digest in wanted], name


def test_a_group_that_failed_at_an_adapter_is_not_asked_for_it() -> None:
    assert hints(TABLE, EMPTY, {A: 1.0}, KNOWN, {("g1", A)}) == [Hint("stage", "g2", A)]


def test_what_no_name_leads_to_any_more_is_evicted() -> None:
    resident = {"g1": frozenset({A, D}), "g2": frozenset({D})}
    assert hints(TABLE, resident, {}, KNOWN) == [Hint("evict", "g1", D), Hint("evict", "g2", D)]


def test_a_cold_adapter_that_is_known_is_left_alone() -> None:
    assert hints({}, {"g1": frozenset({A, B})}, {}, KNOWN) == []


@pytest.mark.parametrize(
    ("rates", "may_go"),
    [
        ({A: 2.0, B: 1.0, C: 1.0, E: 2.0}, (D, C)),
        ({A: 2.0, B: 1.0, C: 1.0, D: 0.5, E: 1.5}, (D, C, E)),
        ({A: 2.0, C: 3.0, D: 3.0, E: 3.0}, (B,)),
        ({}, ()),
    ],
)
def test_what_may_go_for_an_adapter_is_what_nobody_asks_for_and_what_is_colder_and_not_to_be_there(
    rates: dict[Digest, float], may_go: tuple[Digest, ...]
) -> None:
    """B is to be there."""
    assert over("g1", A, TABLE, {"g1": frozenset({B, C, D, E})}, rates) == may_go
