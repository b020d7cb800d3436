"""`infinilora bench`: measurements of one's own machine."""

import typer

from infinilora.cli.costs_command import costs
from infinilora.cli.link_command import link
from infinilora.cli.record_command import record
from infinilora.cli.trace_command import trace

app = typer.Typer(no_args_is_help=True, help="Measurements of this machine.")
app.command()(trace)
app.command()(link)
app.command()(record)
app.command()(costs)


@app.callback()
def bench() -> None:
    """Measurements of this machine."""
