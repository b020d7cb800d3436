"""What LoRA servers are asked to do, by table."""

import pytest

from infinilora.coordinator.hints import Hint, hints
from infinilora.coordinator.placement import Home, Plan
from infinilora.protocol.ids import Digest, digest_of

A, B, C, D, E = sorted(digest_of(name.encode()) for name in "abcde")
PLAN: Plan = {A: Home(("g1", "g2"), "kept"), B: Home(("g1",), "kept"), C: Home(("g2",), "kept"), D: Home((), "no room")}
KNOWN = frozenset({A, B, C})
EMPTY: dict[str, frozenset[Digest]] = {"g1": frozenset(), "g2": frozenset()}


@pytest.mark.parametrize(
    ("name", "resident", "heat", "wanted"),
    [
        ("no heat, nothing to do", EMPTY, {}, []),
        ("heat and nowhere: stage, hottest first", EMPTY, {B: 1.0, C: 2.0}, [("g2", C), ("g1", B)]),
        ("resident anywhere: nothing", {"g1": frozenset(), "g2": frozenset({B})}, {B: 1.0}, []),
        ("of two copies both are wanted", EMPTY, {A: 9.0}, [("g1", A), ("g2", A)]),
        ("a second copy", {"g1": frozenset({A}), "g2": frozenset()}, {A: 9.0}, [("g2", A)]),
        (
            "a first copy is before another's second",
            {"g1": frozenset({A}), "g2": frozenset()},
            {A: 9.0, B: 0.1},
            [("g1", B), ("g2", A)],
        ),
        ("not planned anywhere: not staged", EMPTY, {D: 5.0}, []),
        ("unknown to the plan: not staged", EMPTY, {E: 5.0}, []),
        ("a group that cannot be asked is not", {"g2": frozenset()}, {B: 1.0, C: 0.5}, [("g2", C)]),
    ],
)
def test_stage(
    name: str,
    resident: dict[str, frozenset[Digest]],
    heat: dict[Digest, float],
    wanted: list[tuple[str, Digest]],
) -> None:
    found = hints(PLAN, resident, heat, KNOWN)
    assert found == [Hint("stage", group, digest) for group, digest in wanted], name


def test_what_no_name_leads_to_any_more_is_evicted() -> None:
    resident = {"g1": frozenset({A, D}), "g2": frozenset({D})}
    assert hints(PLAN, resident, {}, KNOWN) == [Hint("evict", "g1", D), Hint("evict", "g2", D)]


def test_a_cold_adapter_that_is_known_is_left_alone() -> None:
    assert hints({}, {"g1": frozenset({A, B})}, {}, KNOWN) == []
