"""Adapters as a person sees them, whatever release the gateway is of."""

import pytest
from rich.console import Console

from infinilora.cli.adapter_commands import table_of
from infinilora.cli.api import Json

RECORD: Json = {
    "name": "mine",
    "version": 3,
    "digest": "sha256:" + "ab" * 32,
    "base": "tiny",
    "state": "resident",
    "max_rank": 16,
    "bytes": 2_000_000,
}


def shown(record: Json) -> list[str]:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(table_of([record]))
    return capture.get().splitlines()[1].split()


def test_an_adapter_is_a_line() -> None:
    assert shown(RECORD) == ["mine", "3", "sha256:" + "ab" * 6, "tiny", "resident", "16", "2.0", "MB"]


@pytest.mark.parametrize("field", RECORD)
def test_any_field_that_is_not_said_is_shown_as_unknown_alone(field: str) -> None:
    whole, place = shown(RECORD), list(RECORD).index(field)
    rest = {name: value for name, value in RECORD.items() if name != field}
    assert shown(rest) == [*whole[:place], "unknown", *whole[place + 1 if field != "bytes" else len(whole) :]]


def test_brackets_are_shown_as_they_are() -> None:
    assert shown({**RECORD, "name": "[red]mine"})[0] == "[red]mine"
