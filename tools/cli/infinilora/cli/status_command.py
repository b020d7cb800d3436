"""`infinilora status`: the fleet as the coordinator sees it, and the adapters as the gateway does."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from infinilora.cli.adapter_commands import table_of
from infinilora.cli.api import Api, Json
from infinilora.cli.find import coordinator, gateway
from infinilora.cli.options import ApiKey, AsJson, Url, VarDir
from infinilora.cli.terminal import err, errors, in_bytes, out, show_table

Coordinator = Annotated[
    str,
    typer.Option("--coordinator", envvar="INFINILORA_COORDINATOR_URL", help="Default: that of --var-dir's system."),
]


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
        show_table(_members(fleet))
        out.print()
    else:
        err.print("[dim]no coordinator is known here; --coordinator URL shows the fleet[/dim]")
    show_table(table_of(adapters))


def _members(fleet: Json) -> Table:
    table = Table("process", "state", "health", "address", "load", box=None, pad_edge=False)
    for member in fleet["members"]:
        mark = " (leads)" if member["id"] == fleet["leader"] else ""
        table.add_row(member["id"] + mark, member["state"], member["health"], member["address"], _load(member["load"]))
    return table


def _load(load: Json | None) -> str:
    match load:
        case {"running": running, "waiting": waiting, "kv_blocks_free": free, "kv_blocks_total": total}:
            return f"{running} running, {waiting} waiting, {free} of {total} KV blocks free"
        case {"bytes_free": free, "bytes_total": total, "leases": leases, "resident": resident}:
            used = f"{in_bytes(total - free)} of {in_bytes(total)}"
            return f"{len(resident)} adapters resident, {used}, {leases} leases"
        case _:
            return ""
