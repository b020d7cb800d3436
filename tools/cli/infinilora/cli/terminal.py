"""What all commands show and how they end: one console, one way to report an error, one set of exit codes."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from infinilora.protocol.errors import InfiniLoraError, Unavailable

REFUSED = 1
UNREACHABLE = 3
"""2 is what the parser of the command line exits with."""

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)
PIPE_WIDTH = 200
"""Columns of a table where nobody looks: a program wants one line for one row."""


def wide() -> Console:
    """Where tables go."""
    return out if out.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def show_table(table: Table | Group) -> None:
    wide().print(table)


def show_error(error: InfiniLoraError) -> None:
    err.print(f"[red]{error.code}[/red]: {escape(error.message)}")


@contextmanager
def errors() -> Iterator[None]:
    """Turn our errors into a line on stderr and an exit code."""
    try:
        yield
    except InfiniLoraError as error:
        show_error(error)
        raise typer.Exit(UNREACHABLE if isinstance(error, Unavailable) else REFUSED) from None


def bars() -> Progress:
    """Progress bars that vanish when done; on a pipe nothing is drawn."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def in_bytes(count: float) -> str:
    """A size as a person reads it: 4.9 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
