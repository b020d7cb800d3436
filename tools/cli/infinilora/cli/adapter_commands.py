"""`infinilora adapter`: check, push, list, show, alias, roll back, pin, verify and remove adapters."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from infinilora.cli import check as checks
from infinilora.cli import demo
from infinilora.cli.api import Api, Json, Wish, adapter_files
from infinilora.cli.find import gateway
from infinilora.cli.fleet_tables import UNKNOWN
from infinilora.cli.given import given
from infinilora.cli.models import DEMO_MODELS
from infinilora.cli.options import ApiKey, AsJson, Tenant, Url, VarDir
from infinilora.cli.terminal import REFUSED, bars, err, errors, in_bytes, out, show_error, show_table
from infinilora.gateway.ingest import IngestLimits
from infinilora.protocol.errors import InvalidRequest, from_wire
from infinilora.protocol.ingest import PlanRow

app = typer.Typer(no_args_is_help=True, help="Adapters.")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="What PEFT saved: adapter_config.json and its safetensors.")
]
Source = Annotated[
    str, typer.Argument(metavar="DIR|URI", help="What PEFT saved here, or s3://bucket/prefix for the gateway to read.")
]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="NAME, NAME@vN or NAME@sha256:...")]
To = Annotated[str, typer.Option("--to", metavar="vN", help="Which version; by default the one before.")]
Model = Annotated[Path, typer.Option("--model", help="The base model: a Hugging Face directory.")]
Base = Annotated[str, typer.Option("--base", help="The served base model it is for, where there are several.")]
Narrow = Annotated[str, typer.Option("--narrow", help="Pack as BF16 or F16: half the size, no longer exact.")]
MaxRank = Annotated[int, typer.Option("--max-rank", min=1, help="The gateway's limit, INFINILORA_MAX_RANK.")]
MemoryMb = Annotated[
    int, typer.Option("--memory-mb", envvar="INFINILORA_INGEST_MEMORY_MB", min=1, help="Of the process that reads it.")
]
CpuS = Annotated[
    int, typer.Option("--cpu-s", envvar="INFINILORA_INGEST_CPU_S", min=1, help="Seconds of a processor it may take.")
]
WallS = Annotated[
    float, typer.Option("--wall-s", envvar="INFINILORA_INGEST_WALL_S", min=1, help="Seconds that it may take.")
]
LIMITS = IngestLimits()
Name = Annotated[str, typer.Option("--name", help="What clients will call it.")]
Named = Annotated[str, typer.Argument(metavar="NAME")]
DemoModel = Annotated[str, typer.Argument(metavar="MODEL", help=", ".join(DEMO_MODELS))]
Replace = Annotated[bool, typer.Option("--replace", help="A new version behind a name that is in use.")]


@contextmanager
def a_gateway(
    *, tenant: Tenant = "", url: Url = "", api_key: ApiKey = "", var_dir: VarDir = Path(".var")
) -> Iterator[Api]:
    """The one that these commands ask, and for whom. What it refuses ends the command."""
    with errors(), Api(gateway(url, var_dir), api_key=api_key, tenant=tenant) as api:
        yield api


@app.command()
@given(a_gateway)
def push(
    api: Api, source: Source, name: Name, *, replace: Replace = False, base: Base = "", narrow: Narrow = ""
) -> None:
    """Register an adapter. It is checked against the base model, tensor by tensor, before the name works."""
    wish = Wish(name, replace, base, narrow)
    record = api.register(source, wish) if "://" in source else _upload(api, Path(source), wish)
    for warning in record.get("warnings", []):
        err.print(f"[yellow]warning[/yellow]: {escape(warning['text'])}")
    out.print(f"{record['name']} {record['digest']}")


def _upload(api: Api, directory: Path, wish: Wish) -> Json:
    """Send a directory's two files under a progress bar."""
    total = sum(path.stat().st_size for path in adapter_files(directory))
    with bars() as progress:
        task = progress.add_task(f"uploading {wish.name}", total=total)

        def on_bytes(count: int) -> None:
            progress.advance(task, count)
            if progress.tasks[task].finished:
                progress.update(task, description=f"checking {wish.name}")

        return api.push(directory, wish, on_bytes=on_bytes)


@app.command()
def check(
    directory: Directory,
    model: Model,
    *,
    narrow: Narrow = "",
    max_rank: MaxRank = LIMITS.max_rank,
    memory_mb: MemoryMb = LIMITS.memory_mb,
    cpu_s: CpuS = LIMITS.cpu_s,
    wall_s: WallS = LIMITS.wall_s,
    as_json: AsJson = False,
) -> None:
    """Say whether an adapter can be served on a base model, and how. Needs no server; exit status 0: it can.

    It is read within the limits that a gateway sets, by default and by its own settings.
    """
    limits = IngestLimits(memory_mb=memory_mb, cpu_s=cpu_s, wall_s=wall_s, max_rank=max_rank)
    with errors():
        verdict = checks.check(directory, model, limits, narrow=narrow)
    if as_json:
        out.print_json(msgspec.json.encode({"servable": verdict.is_servable, **msgspec.to_builtins(verdict)}).decode())
    elif report := verdict.report:
        show_table(plan_table(report.plan))
        for warning in report.warnings:
            err.print(f"[yellow]warning[/yellow]: {escape(warning.text)}")
        how = f"narrowed to {narrow}" if narrow else "exactly"
        size = in_bytes(report.manifest.data_bytes)
        out.print(f"can be served on {verdict.base} {how}: {report.digest}, {size}", markup=False)
    if verdict.error:
        show_error(from_wire(verdict.error))
    if not verdict.is_servable:
        raise typer.Exit(REFUSED)


@app.command(name="ls")
@given(a_gateway)
def list_adapters(api: Api, *, as_json: AsJson = False) -> None:
    """List the adapters."""
    records = list(api.adapters())
    if as_json:
        out.print_json(json.dumps(records))
        return
    show_adapters(records)


@app.command()
@given(a_gateway)
def show(api: Api, name: Named) -> None:
    """Show all that is known of an adapter, as JSON."""
    record = api.adapter(name)
    out.print_json(json.dumps(record))


@app.command()
@given(a_gateway)
def alias(api: Api, name: Named, target: Target) -> None:
    """Let a name mean an adapter or one of its versions, from now on."""
    record = api.alias(name, target)
    out.print(f"{name} {record['name']}@v{record['version']} {record['digest']}", markup=False)


@app.command()
@given(a_gateway)
def rollback(api: Api, name: Named, *, to: To = "") -> None:
    """Make an earlier version the current one. Running requests finish on theirs."""
    number = to.removeprefix("v")
    if number and not number.isdecimal():
        raise InvalidRequest(f"--to {to!r}: wanted a version, like v3", param="to")
    record = api.rollback(name, int(number) if number else None)
    out.print(f"{record['name']} v{record['version']} {record['digest']}", markup=False)


@app.command()
@given(a_gateway)
def pin(api: Api, name: Named) -> None:
    """Keep an adapter of yours resident, whatever its heat; `infinilora pin` is an operator's, and audited."""
    record = api.pin(name, pinned=True)
    out.print(f"{record['name']} is pinned", markup=False)


@app.command()
@given(a_gateway)
def unpin(api: Api, name: Named) -> None:
    """Let an adapter of yours be evicted again."""
    record = api.pin(name, pinned=False)
    out.print(f"{record['name']} is not pinned", markup=False)


@app.command()
@given(a_gateway)
def verify(api: Api, name: Named) -> None:
    """Have all that the store holds of an adapter read, hashed and self-tested; exit status 0: it is as it was made."""
    report = api.verify(name)
    for fault in report["faults"]:
        err.print(f"[red]fault[/red]: {escape(str(fault))}")
    told = f"{name} v{report['version']} {report['digest']}: {report['blocks']} blocks, {in_bytes(report['bytes'])}"
    if not report["ok"]:
        out.print(f"{told}, {report['num_faults']} of them broken", markup=False)
        raise typer.Exit(REFUSED)
    out.print(f"{told}, all whole; {_told_of_test(report.get('self_test'))}", markup=False)


def _told_of_test(test: Json | None) -> str:
    if test is None:
        return "not self-tested: it was packed before answers of its files were kept; push them again to have them"
    return f"self-test passed: {test['parts']} parts compute what its files did, within {test['error']:.1e}"


@app.command(name="rm")
@given(a_gateway)
def remove(api: Api, name: Named) -> None:
    """Remove an adapter, or an alias. Requests that run with it finish."""
    api.remove(name)
    out.print(f"removed {name}", markup=False)


@app.command(name="demo")
@given(a_gateway)
def push_demo(api: Api, model: DemoModel) -> None:
    """Register the demo adapters of a demo model; names that are in use are left alone."""
    demo.register(api, model, None)
    out.print(" ".join(adapter.name for adapter in demo.adapters_of(model)) or f"{model} has no demo adapters")


def show_adapters(records: list[Json]) -> None:
    """The adapters, and why those failed that could not be loaded."""
    show_table(table_of(records))
    for record in records:
        if reason := record.get("state_reason"):
            err.print(f"[red]{escape(record['name'])}[/red]: {escape(reason)}")


def table_of(records: list[Json]) -> Table:
    """Adapters as a table; digests are cut where they still tell them apart. What is not said is shown as unknown."""
    table = Table("name", "version", "digest", "base", "state", "rank", "size", box=None, pad_edge=False)
    for record in records:
        told = [str(record.get(field, UNKNOWN)) for field in ("name", "version", "digest", "base", "state", "max_rank")]
        size = in_bytes(record["bytes"]) if "bytes" in record else UNKNOWN
        table.add_row(*(escape(_cut_digest(cell)) for cell in told), size)
    return table


def plan_table(rows: Sequence[PlanRow]) -> Table:
    """What becomes of each module."""
    table = Table("module", "site", "rank", "scale", "size", "", box=None, pad_edge=False)
    for row in rows:
        experts = f" x{row.experts}" if row.experts else ""
        told = row.verdict + (f": {row.reason}" if row.reason else "")
        size = in_bytes(row.num_bytes)
        table.add_row(escape(row.module), row.site, f"{row.rank}{experts}", f"{row.scale:g}", size, escape(told))
    return table


def _cut_digest(text: str) -> str:
    """A digest at the length that tells it apart; a name as it is. A base not served has only its digest."""
    return text[:19] if text.startswith("sha256:") else text
