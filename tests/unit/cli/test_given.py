"""Options that come with what a command works with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from typer.testing import CliRunner

from infinilora.cli.given import given


@contextmanager
def a_place(*, where: Annotated[str, typer.Option("--where", help="Of the place.")] = "here") -> Iterator[str]:
    yield f"<{where}>"
    typer.echo("left")


app = typer.Typer()


@app.command()
@given(a_place)
def look(place: str, name: str, *, count: Annotated[int, typer.Option("--count")] = 1) -> None:
    """Look for something."""
    typer.echo(f"{name} x{count} at {place}")


def test_a_command_has_its_own_options_and_those_of_what_it_is_given() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["cat"]).output == "cat x1 at <here>\nleft\n"
    assert runner.invoke(app, ["cat", "--where", "there", "--count", "2"]).output == "cat x2 at <there>\nleft\n"
    told = runner.invoke(app, ["--help"]).output
    assert "Look for something." in told
    assert "Of the place." in told
    assert "PLACE" not in told, "what is given is nobody's to type"
