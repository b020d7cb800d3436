"""What an operator does by hand: pin, evict, drain, freeze, rebalance, and who did what. Any coordinator takes it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from infinilora.cli.api import Api, Json
from infinilora.cli.find import operator
from infinilora.cli.given import given
from infinilora.cli.options import AdminKey, AsJson, Coordinator, VarDir
from infinilora.cli.terminal import REFUSED, errors, in_bytes, out, show_table
from infinilora.protocol.errors import InvalidRequest

AUTO, TAKEN = "auto", "taken"
SHOWN = 50
"""Adapters in a table; --json has more."""
UNFOLLOWED = (
    "the coordinator carries out no counts here (INFINILORA_SCALER is none; with `infinilora up`, --max-engines or "
    "--max-groups change that): whoever follows infinilora_desired does"
)

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="NAME or TENANT/NAME.")]
Evicted = Annotated[str, typer.Argument(metavar="ADAPTER", help="NAME, TENANT/NAME, or sha256:...")]
MemberName = Annotated[str, typer.Argument(metavar="MEMBER", help="A group of LoRA servers, or an engine.")]
Group = Annotated[str, typer.Option("--group", help="Of this group alone.")]
Tier = Annotated[str, typer.Argument(metavar="engines|groups", help="Of what.")]
Count = Annotated[str, typer.Argument(metavar="N|auto", help="So many; auto: by traffic.")]
Model = Annotated[str, typer.Option("--model", help="The base's served name, where there are several.")]
Force = Annotated[bool, typer.Option("--force", help="Also more than the coordinator's ceiling.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it stays in the audit.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be where, what would change, and why.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Plan as if nothing were anywhere, whatever it moves.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="So many, the latest first.")]


Act = Callable[..., Json]
"""Has the leader do what is named, with its fields; returns what it says it did. A refusal ends the command."""


@contextmanager
def a_coordinator(
    *, coordinator: Coordinator = "", admin_key: AdminKey = "", var_dir: VarDir = Path(".var")
) -> Iterator[Api]:
    """Any of them, shown an operator's key."""
    with errors(), operator(coordinator, admin_key, var_dir) as api:
        yield api


@contextmanager
def by_hand(
    *,
    reason: Reason = "",
    coordinator: Coordinator = "",
    admin_key: AdminKey = "",
    var_dir: VarDir = Path(".var"),
) -> Iterator[Act]:
    """What is done with a reason, and audited."""
    with a_coordinator(coordinator=coordinator, admin_key=admin_key, var_dir=var_dir) as api:
        yield lambda act, /, **fields: api.post(f"/v1/admin/{act}", {**fields, "reason": reason})


@given(by_hand)
def pin(act: Act, adapter: Adapter) -> None:
    """Keep an adapter resident, whatever its heat."""
    _say_pinned(act("pin", adapter=adapter), "pinned")


@given(by_hand)
def unpin(act: Act, adapter: Adapter) -> None:
    """Let an adapter be evicted again."""
    _say_pinned(act("pin", adapter=adapter, pinned=False), "unpinned")


@given(by_hand)
def evict(act: Act, adapter: Evicted, *, group: Group = "") -> None:
    """Have an adapter's slots given up. Requests that run keep theirs; whoever asks for it has it loaded again."""
    done = act("evict", adapter=adapter, group=group)
    for order in done["orders"]:
        out.print(f"{order['group']}: {order['digest']} {order['outcome']}", markup=False)
    if not done["orders"]:
        out.print(f"{adapter} is resident nowhere{f' in {group}' if group else ''}", markup=False)
    if any(order["outcome"] != TAKEN for order in done["orders"]):
        raise typer.Exit(REFUSED)


@given(by_hand)
def drain(act: Act, member: MemberName) -> None:
    """Have a group or an engine take no new work; `infinilora status` shows when nothing runs on it."""
    done = act("drain", member=member)
    out.print(f"{member} {'is to drain' if done['changed'] else 'was draining already'}", markup=False)
    if done.get("others") == 0:
        out.print("nobody else takes its work now: what needs it waits until somebody does", markup=False)


@given(by_hand)
def undrain(act: Act, member: MemberName) -> None:
    """Have what was told to drain take work again."""
    act("drain", member=member, draining=False)
    out.print(f"{member} takes work again", markup=False)


@given(by_hand)
def freeze(act: Act) -> None:
    """Have the coordinator place, move and scale nothing by itself until `unfreeze`. Requests are served as before."""
    out.print("frozen" if act("freeze")["changed"] else "was frozen already; now by you")


@given(by_hand)
def unfreeze(act: Act) -> None:
    """Let the coordinator decide by itself again."""
    out.print("not frozen any more" if act("freeze", frozen=False)["changed"] else "was not frozen")


@given(by_hand)
def rebalance(act: Act, *, dry_run: DryRun = False, fresh: Fresh = False, as_json: AsJson = False) -> None:
    """Plan which group holds what, now; with --dry-run, print the plan, what it would change, and why."""
    done = act("rebalance", dry_run=dry_run, fresh=fresh)
    if as_json:
        out.print_json(json.dumps(done))
        return
    for base in done["bases"]:
        shown = base.get("plan", base["moves"]) if dry_run else base["moves"]
        show_table(plan_table(shown[:SHOWN]))
        out.print(changes_line(base, verb="would change" if dry_run else "change"), markup=False)
    if not done["bases"]:
        out.print("no LoRA server is there: nothing to plan")


@given(by_hand)
def scale(act: Act, tier: Tier, count: Count, *, model: Model = "", force: Force = False) -> None:
    """Have so many engines or groups, whatever the traffic; `auto`: as many as it takes. /v1/scale shows what is so."""
    if count != AUTO and not (count.isascii() and count.isdigit()):
        raise InvalidRequest(f"count is {count!r}; wanted a whole number, or {AUTO}", param="count")
    forced = {"force": True} if force else {}
    done = act("scale", tier=tier, count=None if count == AUTO else int(count), model=model, **forced)
    out.print(f"{tier} of {done['model']}: {count}{'' if done['changed'] else ', as before'}", markup=False)
    if done.get("frozen"):
        out.print("the fleet is frozen: carried out once it is not any more")
    elif done.get("follows") == "none":
        out.print(UNFOLLOWED)


@given(a_coordinator)
def audit(api: Api, *, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Show who did what by hand, when, under which epoch, and why."""
    entries = api.get(f"/v1/admin/audit?limit={limit}")["entries"]
    if as_json:
        out.print_json(json.dumps(entries))
        return
    table = Table("number", "when", "who", "epoch", "act", "reason", box=None, pad_edge=False)
    for entry in entries:
        told = " ".join(f"{key}={value}" for key, value in entry["act"].items() if key != "act")
        act = f"{entry['act']['act']} {told}"
        cells = (str(entry["number"]), entry["at"], entry["who"], str(entry["epoch"]), act, entry["reason"])
        table.add_row(*(escape(cell) for cell in cells))
    show_table(table)


def changes_line(base: Json, *, verb: str) -> str:
    """All that a plan changes of one base, which is called as requests call it, if anybody serves it."""
    counts = ", ".join(f"{count} {why}" for why, count in base["reasons"].items()) or "no adapters"
    name = base.get("model") or base["base"][:19]
    return f"{name}: {base['num_moves']} {verb}, {in_bytes(base['num_bytes'])} to bring in; {counts}"


def plan_table(moves: list[Json]) -> Table:
    """Where each adapter is and is to be; those that move first, hottest first."""
    table = Table("adapter", "why", "from", "to", "requests/s", "to bring in", box=None, pad_edge=False)
    for move in moves:
        table.add_row(
            escape(move["name"] or move["digest"][:19]),
            move["reason"],
            escape(", ".join(move["before"]) or "-"),
            escape(", ".join(move["after"]) or "-"),
            f"{move['rps']:.2f}",
            in_bytes(move["num_bytes"]),
        )
    return table


def _say_pinned(done: Json, what: str) -> None:
    out.print(
        f"{done['adapter']} {what if done['changed'] else f'was {what} already'} ({done['digest']})", markup=False
    )


COMMANDS = (pin, unpin, evict, drain, undrain, freeze, unfreeze, rebalance, scale, audit)
