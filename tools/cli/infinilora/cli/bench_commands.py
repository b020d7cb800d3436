"""`infinilora bench`: measurements of one's own machine."""

import typer

from infinilora.cli.link_command import link
from infinilora.cli.trace_command import trace

app = typer.Typer(no_args_is_help=True, help="Measurements of this machine.")
app.command()(trace)
app.command()(link)


@app.callback()
def bench() -> None:
    """Measurements of this machine."""
