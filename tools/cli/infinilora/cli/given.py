"""Options that say where a command is carried out: written once, with what they open, and added to each command."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

Command = Callable[..., None]


def given(opened: Callable[..., AbstractContextManager[Any]]) -> Callable[[Command], Command]:
    """Of a command whose first argument is what `opened` opens: one with its own options, and those of `opened`."""
    where = inspect.signature(opened).parameters

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**options: Any) -> None:
            with opened(**{name: options.pop(name) for name in where}) as it:
                command(it, **options)

        _, *own = inspect.signature(command).parameters.values()
        shown = inspect.Signature([*own, *where.values()])
        # What typer makes the command line of.
        run.__dict__["__signature__"] = shown
        run.__annotations__ = {name: each.annotation for name, each in shown.parameters.items()}
        return run

    return decorate
