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
from infinilora.cli.terminal import errors, in_bytes, out

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
            adapters = api.adapters()
        where = coordinator(coordinator_url, var_dir)
        fleet: Json | None = None
        if where:
            with Api(where) as api:
                fleet = api.get("/v1/fleet")
    if as_json:
        out.print_json(json.dumps({"fleet": fleet, "adapters": adapters}))
        return
    out.print(_members(fleet) if fleet else "[dim]no coordinator named: --coordinator URL shows the fleet[/dim]")
    out.print()
    out.print(table_of(adapters) if adapters else "no adapters")


def _members(fleet: Json) -> Table:
    table = Table("process", "state", "health", "address", "load", box=None, pad_edge=False)
    for member in fleet["members"]:
        name = f"{member['kind']} {member['id']}" + (" (leader)" if member["id"] == fleet.get("leader") else "")
        table.add_row(name, member["state"], member["health"], member.get("address", ""), _load(member.get("load")))
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
