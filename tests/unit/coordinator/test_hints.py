"""What LoRA servers are asked to do, by table."""

import pytest

from infinilora.coordinator.hints import Hint, hints
from infinilora.coordinator.placement import Plan
from infinilora.protocol.ids import Digest, digest_of

A, B, C, D = sorted(digest_of(name.encode()) for name in "abcd")
PLAN: Plan = {"g1": (A, B), "g2": (A, C)}
KNOWN = frozenset({A, B, C})
EMPTY: dict[str, frozenset[Digest]] = {"g1": frozenset(), "g2": frozenset()}


@pytest.mark.parametrize(
    ("name", "resident", "heat", "hot", "wanted"),
    [
        ("no heat, nothing to do", EMPTY, {}, (), []),
        ("heat and nowhere: stage, hottest first", EMPTY, {B: 1.0, C: 2.0}, (), [("g2", C), ("g1", B)]),
        ("one copy is enough for the warm", EMPTY, {A: 1.0}, (), [("g1", A)]),
        ("resident anywhere: nothing", {"g1": frozenset(), "g2": frozenset({A})}, {A: 1.0}, (), []),
        ("the hot are wanted everywhere", EMPTY, {A: 9.0}, (A,), [("g1", A), ("g2", A)]),
        ("a hot second", {"g1": frozenset({A}), "g2": frozenset()}, {A: 9.0}, (A,), [("g2", A)]),
        (
            "a first copy is before a hot second",
            {"g1": frozenset({A}), "g2": frozenset()},
            {A: 9.0, B: 0.1},
            (A,),
            [("g1", B), ("g2", A)],
        ),
        ("not planned anywhere: not staged", EMPTY, {D: 5.0}, (), []),
        ("a group that cannot be asked is not", {"g2": frozenset()}, {B: 1.0, C: 0.5}, (), [("g2", C)]),
    ],
)
def test_stage(
    name: str,
    resident: dict[str, frozenset[Digest]],
    heat: dict[Digest, float],
    hot: tuple[Digest, ...],
    wanted: list[tuple[str, Digest]],
) -> None:
    found = hints(PLAN, resident, heat, KNOWN, frozenset(hot))
    assert found == [Hint("stage", group, digest) for group, digest in wanted], name


def test_what_no_name_leads_to_any_more_is_evicted() -> None:
    resident = {"g1": frozenset({A, D}), "g2": frozenset({D})}
    assert hints(PLAN, resident, {}, KNOWN, frozenset()) == [Hint("evict", "g1", D), Hint("evict", "g2", D)]


def test_a_cold_adapter_that_is_known_is_left_alone() -> None:
    assert hints({"g1": ()}, {"g1": frozenset({A, B})}, {}, KNOWN, frozenset()) == []
