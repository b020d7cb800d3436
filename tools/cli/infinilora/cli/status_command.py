"""`infinilora status` and `infinilora top`: the fleet as the coordinator sees it, once with the adapters, or live."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.live import Live

from infinilora.cli.adapter_commands import show_adapters
from infinilora.cli.api import Api, Json
from infinilora.cli.find import coordinator, gateway
from infinilora.cli.fleet_tables import glance
from infinilora.cli.options import ApiKey, AsJson, Coordinator, Url, VarDir
from infinilora.cli.terminal import UNREACHABLE, err, errors, out, show_error, show_table, wide
from infinilora.protocol.errors import InvalidRequest, Unavailable

T = TypeVar("T")

LOOK_S = 10.0
"""For an answer: what was stopped takes connections still, and says nothing."""
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
    """Show processes, their load, and the adapters; what does not answer is said, and the rest is shown."""
    with errors():
        where = coordinator(coordinator_url, var_dir)
        fleet = _answered(partial(_fleet, where)) if where else None
        adapters = _answered(partial(_adapters, gateway(url, var_dir), api_key))
    if as_json:
        out.print_json(json.dumps({"fleet": fleet, "adapters": adapters}))
    else:
        _show(fleet, adapters)
    if where is None:
        err.print("[dim]no coordinator is known here; --coordinator URL shows the fleet[/dim]")
    if adapters is None or (where and fleet is None):
        raise typer.Exit(UNREACHABLE)


def _fleet(where: str) -> Json:
    with Api(where, is_coordinator=True, read_s=LOOK_S) as api:
        return api.get("/v1/fleet")


def _adapters(where: str, api_key: str) -> list[Json]:
    with Api(where, api_key=api_key, read_s=LOOK_S) as api:
        return list(api.adapters())


def _answered(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Unavailable as error:
        show_error(error)
        return None


def _show(fleet: Json | None, adapters: list[Json] | None) -> None:
    if fleet is not None:
        show_table(glance(fleet))
    if fleet is not None and adapters is not None:
        out.print()
    if adapters is not None:
        show_adapters(adapters)


def top(
    *, interval: Interval = 1.0, looks: Looks = 0, coordinator_url: Coordinator = "", var_dir: VarDir = Path(".var")
) -> None:
    """Watch the fleet: who is there, what runs, which adapters are hot and where."""
    with errors():
        where = coordinator(coordinator_url, var_dir)
        if where is None:
            raise InvalidRequest(f"no coordinator is known: {var_dir} runs no system here; give --coordinator URL")
        api = Api(where, is_coordinator=True, read_s=LOOK_S)
        with api, Live(console=wide(), screen=out.is_terminal, auto_refresh=False) as live:
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
