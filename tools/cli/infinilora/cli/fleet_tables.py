"""The fleet as tables: what `infinilora status` prints once and `infinilora top` again and again."""

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from infinilora.cli.api import Json
from infinilora.cli.terminal import in_bytes

HOTTEST = 10


def glance(fleet: Json, *, hottest: int = HOTTEST) -> Group:
    """Who leads, every process with its load, the hottest adapters and where they are."""
    parts: list[Table | Text] = [Text(headline(fleet)), members_table(fleet)]
    if fleet["heat"]:
        parts += [Text(""), heat_table(fleet, hottest)]
    return Group(*parts)


def headline(fleet: Json) -> str:
    """One line: who leads under which epoch, and whether anything is decided now."""
    told = [f"{fleet['leader']} leads, epoch {fleet['epoch']}" if fleet["leader"] else "nobody leads"]
    if by := fleet["frozen_by"]:
        told.append(f"frozen by {by['who']} at {by['at']}" + (f": {by['reason']}" if by["reason"] else ""))
    if fleet["is_frozen"]:
        told.append("nothing is decided: the members cannot be seen well enough")
    if fleet["drains"]:
        told.append(f"to drain: {', '.join(fleet['drains'])}")
    return "; ".join(told)


def members_table(fleet: Json) -> Table:
    table = Table("process", "state", "health", "address", "load", box=None, pad_edge=False)
    for member in fleet["members"]:
        mark = " (leads)" if member["id"] == fleet["leader"] else ""
        cells = (member["id"] + mark, member["state"], member["health"], member["address"], _load(member["load"]))
        table.add_row(*(escape(cell) for cell in cells))
    return table


def heat_table(fleet: Json, hottest: int) -> Table:
    """The hottest adapters: requests a second, and the groups that have them now."""
    holders: dict[str, list[str]] = {}
    for member in fleet["members"]:
        for digest in (member["load"] or {}).get("resident", ()) if member["health"] != "dead" else ():
            holders.setdefault(digest, []).append(member["group"] or member["id"])
    table = Table("adapter", "requests/s", "resident on", box=None, pad_edge=False)
    for row in fleet["heat"][:hottest]:
        where = ", ".join(holders.get(row["digest"], ())) or "-"
        table.add_row(escape(row["name"] or row["digest"][:19]), f"{row['rps']:.2f}", escape(where))
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
