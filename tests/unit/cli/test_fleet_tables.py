"""The fleet as a person sees it, whatever release the coordinator is of."""

from typing import Any

import pytest
from rich.console import Console

from infinilora.cli.fleet_tables import glance, headline

ENGINE = {"running": 3, "waiting": 1, "kv_blocks_free": 20, "kv_blocks_total": 100}
POOL = {"bytes_free": 1_000_000, "bytes_total": 5_000_000, "leases": 2, "resident": ["sha256:aa"]}
ALIVE = {"state": "ready", "health": "alive"}


def fleet() -> dict[str, Any]:
    """All that a coordinator says: one of each service, one adapter that is hot, and everything out of the ordinary."""
    return {
        "coordinator": "c-1",
        "leader": "c-1",
        "is_leading": True,
        "epoch": 7,
        "is_frozen": True,
        "frozen_by": {"who": "ann", "at": "12:00", "reason": "upgrade"},
        "drains": ["e-1"],
        "members": [
            {"id": "c-1", **ALIVE, "away": [], "address": "a:1", "group": None, "load": None},
            {"id": "e-1", **ALIVE, "away": [], "address": "a:2", "group": None, "load": ENGINE},
            {"id": "l-1", **ALIVE, "away": ["store"], "address": "a:3", "group": "g-1", "load": POOL},
        ],
        "placement": {},
        "heat": [{"digest": "sha256:aa", "name": "mine", "rps": 2.5, "is_rising": True}],
    }


def shown(told: dict[str, Any]) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(glance(told))
    return capture.get()


def without(told: Any, field: str) -> Any:
    """The same with no field of this name, at any depth."""
    match told:
        case dict():
            return {key: without(value, field) for key, value in told.items() if key != field}
        case list():
            return [without(value, field) for value in told]
        case _:
            return told


def fields(told: Any) -> set[str]:
    match told:
        case dict():
            return set(told).union(*(fields(value) for value in told.values()))
        case list():
            return set().union(*(fields(value) for value in told))
        case _:
            return set()


def test_what_is_said_is_shown_and_nothing_is_unknown() -> None:
    lines = shown(fleet()).splitlines()
    assert lines[0].rstrip() == (
        "c-1 leads, epoch 7; frozen by ann at 12:00: upgrade; "
        "nothing is decided: the members cannot be seen well enough; to drain: e-1"
    )
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[2:]]
    assert cells == [
        ["c-1 (leads)", "ready", "alive", "a:1"],
        ["e-1", "ready", "alive", "a:2", "3 running, 1 waiting, 20 of 100 KV blocks free"],
        ["l-1", "ready", "alive", "store", "a:3", "1 adapters resident, 4.0 MB of 5.0 MB, 2 leases"],
        [],
        ["adapter", "requests/s", "resident on"],
        ["mine", "2.50 rising", "g-1"],
    ]


def test_an_older_coordinator_says_nothing_of_freezes_and_drains() -> None:
    older = without(without(fleet() | {"is_frozen": False}, "frozen_by"), "drains")
    assert headline(older) == "c-1 leads, epoch 7; unknown: whether somebody froze it, what is to drain"


UNSEEN = {"coordinator", "is_leading", "placement", "group", "name", "is_rising"}
"""Not shown, or something else stands in for it."""


@pytest.mark.parametrize("field", sorted(fields(fleet()) - UNSEEN))
def test_any_field_that_is_not_said_is_shown_as_unknown(field: str) -> None:
    """Alone, so the rest is shown as ever."""
    told = shown(without(fleet(), field))
    assert "unknown" in told
    assert "mine" in told or field == "heat"


@pytest.mark.parametrize("field", sorted(UNSEEN))
def test_what_is_not_shown_is_not_missed(field: str) -> None:
    assert "unknown" not in shown(without(fleet(), field))


def test_nothing_said_at_all_is_a_line() -> None:
    assert headline({}).startswith("unknown: who leads, who is there, ")
