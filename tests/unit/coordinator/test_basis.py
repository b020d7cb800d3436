"""When another plan is worth its time, by table."""

from dataclasses import replace
from typing import Any

import pytest

from infinilora.coordinator.basis import Basis
from infinilora.coordinator.placement import Adapter, Group
from infinilora.protocol.ids import digest_of

A, B, C = sorted(digest_of(name.encode()) for name in "abc")
MADE = Basis(
    groups=[Group("g1", 100), Group("g2", 100)],
    registered={A: Adapter(A, 10), B: Adapter(B, 10)},
    copies={A: 2},
    rising={A},
    homeless={B},
    rates={A: 3.0, B: 1.0},
    follow_at=100.0,
)
BEFORE, AFTER = 99.0, 100.0


@pytest.mark.parametrize(
    ("name", "now", "changed", "holds"),
    [
        ("nothing has changed", BEFORE, {}, True),
        ("nothing has changed for long", AFTER, {}, True),
        ("rates have, a moment ago", BEFORE, {"rates": {A: 9.0, B: 1.0}}, True),
        ("rates have, and it is time", AFTER, {"rates": {A: 9.0, B: 1.0}}, False),
        ("one is asked for that has its place", BEFORE, {"rates": {A: 3.0, B: 1.0, C: 1.0}}, True),
        ("one is asked for that is nowhere", BEFORE, {"homeless": {B, C}}, False),
        ("one that was nowhere is asked for no more", BEFORE, {"homeless": set()}, True),
        ("one more rises", BEFORE, {"rising": {A, B}}, False),
        ("one rises no more", BEFORE, {"rising": set()}, True),
        ("one wants another copy", BEFORE, {"copies": {A: 3}}, False),
        ("one wants none more", BEFORE, {"copies": {}}, False),
        ("a group came", BEFORE, {"groups": [*MADE.groups, Group("g3", 100)]}, False),
        ("a group is to drain", BEFORE, {"groups": [MADE.groups[0], replace(MADE.groups[1], state="draining")]}, False),
        ("a group has other bytes", BEFORE, {"groups": [MADE.groups[0], Group("g2", 99)]}, False),
        ("an adapter came", BEFORE, {"registered": {**MADE.registered, C: Adapter(C, 1)}}, False),
        (
            "an adapter was pinned",
            BEFORE,
            {"registered": {**MADE.registered, B: Adapter(B, 10, is_pinned=True)}},
            False,
        ),
        ("the same read again", BEFORE, {"registered": dict(MADE.registered), "groups": list(MADE.groups)}, True),
    ],
)
def test_a_plan_holds(name: str, now: float, changed: dict[str, Any], holds: bool) -> None:
    assert MADE.holds(replace(MADE, follow_at=now, **changed)) == holds, name
