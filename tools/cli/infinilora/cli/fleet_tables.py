"""The fleet as tables: what `infinilora status` prints once and `infinilora top` again and again.

A coordinator of another release may leave fields out: what it does not say is shown as unknown, not as none.
"""

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from infinilora.cli.api import Json
from infinilora.cli.terminal import in_bytes

HOTTEST = 10
UNKNOWN = "unknown"
TOLD = {
    "leader": "who leads",
    "members": "who is there",
    "frozen_by": "whether somebody froze it",
    "is_frozen": "whether anything is decided",
    "drains": "what is to drain",
    "heat": "which adapters are hot",
}
"""What each field of the fleet says."""


def glance(fleet: Json, *, hottest: int = HOTTEST) -> Group:
    """Who leads, every process with its load, the hottest adapters and where they are."""
    parts: list[Table | Text] = [Text(headline(fleet)), members_table(fleet)]
    if fleet.get("heat"):
        parts += [Text(""), heat_table(fleet, hottest)]
    return Group(*parts)


def headline(fleet: Json) -> str:
    """One line: who leads under which epoch, whether anything is decided now, and what this coordinator cannot say."""
    told = []
    if "leader" in fleet:
        epoch = fleet.get("epoch", UNKNOWN)
        told.append(f"{fleet['leader']} leads, epoch {epoch}" if fleet["leader"] else "nobody leads")
    if by := fleet.get("frozen_by"):
        who, at, reason = (by.get(key, UNKNOWN) for key in ("who", "at", "reason"))
        told.append(f"frozen by {who} at {at}" + (f": {reason}" if reason else ""))
    if fleet.get("is_frozen"):
        told.append("nothing is decided: the members cannot be seen well enough")
    if drains := fleet.get("drains"):
        told.append(f"to drain: {', '.join(drains)}")
    if unsaid := [words for field, words in TOLD.items() if field not in fleet]:
        told.append(f"{UNKNOWN}: {', '.join(unsaid)}")
    return "; ".join(told)


def members_table(fleet: Json) -> Table:
    table = Table("process", "state", "health", "away", "address", "load", box=None, pad_edge=False)
    for member in fleet.get("members", ()):
        process, *cells = [str(member.get(field, UNKNOWN)) for field in ("id", "state", "health", "address")]
        process += " (leads)" if process == fleet.get("leader") else ""
        cells.insert(-1, ", ".join(member.get("away", (UNKNOWN,))))
        table.add_row(*(escape(cell) for cell in (process, *cells)), _load(member.get("load", {})))
    return table


def heat_table(fleet: Json, hottest: int) -> Table:
    """The hottest adapters: requests a second, whether they rise, and the groups that have them now."""
    holders: dict[str, list[str]] = {}
    for member in fleet.get("members", ()):
        for digest in (member.get("load") or {}).get("resident", ()) if member.get("health") != "dead" else ():
            holders.setdefault(digest, []).append(member.get("group") or member.get("id", UNKNOWN))
    table = Table("adapter", "requests/s", "resident on", box=None, pad_edge=False)
    for row in fleet["heat"][:hottest]:
        digest = row.get("digest", UNKNOWN)
        is_told = "digest" in row and "members" in fleet
        where = ", ".join(holders.get(digest, ())) or "-" if is_told else UNKNOWN
        rate = f"{row['rps']:.2f}" if "rps" in row else UNKNOWN
        rate += " rising" if row.get("is_rising") else ""
        table.add_row(escape(row.get("name") or digest[:19]), rate, escape(where))
    return table


def _load(load: Json | None) -> str:
    match load:
        case None:
            return ""
        case {"running": running, "waiting": waiting, "kv_blocks_free": free, "kv_blocks_total": total}:
            return f"{running} running, {waiting} waiting, {free} of {total} KV blocks free"
        case {"bytes_free": free, "bytes_total": total, "leases": leases, "resident": resident}:
            used = f"{in_bytes(total - free)} of {in_bytes(total)}"
            told = f"{len(resident)} adapters resident, {used}, {leases} leases"
            return told + (f", {len(load['failed'])} failed" if load.get("failed") else "")
        case _:
            return UNKNOWN
