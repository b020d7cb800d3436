"""`infinilora status` and `infinilora top`: the fleet as the coordinator sees it, once with the adapters, or live."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from infinilora.cli.adapter_commands import show_adapters
from infinilora.cli.api import Api, Json
from infinilora.cli.find import coordinator, gateway
from infinilora.cli.fleet_tables import glance
from infinilora.cli.options import ApiKey, AsJson, Coordinator, Url, VarDir
from infinilora.cli.terminal import err, errors, out, show_table, wide
from infinilora.protocol.errors import InvalidRequest, Unavailable

Interval = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")]
Looks = Annotated[int, typer.Option("--looks", min=0, help="End after so many; 0: at Ctrl-C.")]


def status(
    *,
    as_json: AsJson = False,
    url: Url = "",
    coordinator_url: Coordinator = "",
    api_key: ApiKey = "",
    var_dir: VarDir = Path(".var"),
) -> None:
    """Show processes, their load, and the adapters."""
    with errors():
        with Api(gateway(url, var_dir), api_key=api_key) as api:
            adapters = list(api.adapters())
        where = coordinator(coordinator_url, var_dir)
        fleet: Json | None = None
        if where:
            with Api(where) as api:
                fleet = api.get("/v1/fleet")
    if as_json:
        out.print_json(json.dumps({"fleet": fleet, "adapters": adapters}))
        return
    if fleet:
        show_table(glance(fleet))
        out.print()
    else:
        err.print("[dim]no coordinator is known here; --coordinator URL shows the fleet[/dim]")
    show_adapters(adapters)


def top(
    *, interval: Interval = 1.0, looks: Looks = 0, coordinator_url: Coordinator = "", var_dir: VarDir = Path(".var")
) -> None:
    """Watch the fleet: who is there, what runs, which adapters are hot and where."""
    with errors():
        where = coordinator(coordinator_url, var_dir)
        if where is None:
            raise InvalidRequest(f"no coordinator is known: {var_dir} runs no system here; give --coordinator URL")
        with Api(where) as api, Live(console=wide(), screen=out.is_terminal, auto_refresh=False) as live:
            try:
                _watch(api, live, interval, looks)
            except KeyboardInterrupt:
                return


def _watch(api: Api, live: Live, interval: float, looks: int) -> None:
    """A coordinator that does not answer is shown as that, and asked again."""
    look = 0
    while True:
        try:
            live.update(glance(api.get("/v1/fleet")), refresh=True)
        except Unavailable as error:
            live.update(error.message, refresh=True)
        look += 1
        if look == looks:
            return
        time.sleep(interval)
