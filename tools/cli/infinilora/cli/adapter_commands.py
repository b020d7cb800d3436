"""`infinilora adapter`: push, list, show and remove adapters."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from infinilora.cli import demo
from infinilora.cli.api import Api, Json, adapter_files
from infinilora.cli.find import gateway
from infinilora.cli.models import DEMO_MODELS
from infinilora.cli.options import ApiKey, AsJson, Url, VarDir
from infinilora.cli.terminal import bars, errors, in_bytes, out, show_table

app = typer.Typer(no_args_is_help=True, help="Adapters.")

Directory = Annotated[Path, typer.Argument(help="What PEFT saved: adapter_config.json and its safetensors.")]
Name = Annotated[str, typer.Option("--name", help="What clients will call it.")]
Named = Annotated[str, typer.Argument(metavar="NAME")]
DemoModel = Annotated[str, typer.Argument(metavar="MODEL", help=", ".join(DEMO_MODELS))]
Replace = Annotated[bool, typer.Option("--replace", help="A new version behind a name that is in use.")]


@app.command()
def push(
    directory: Directory,
    name: Name,
    *,
    replace: Replace = False,
    url: Url = "",
    api_key: ApiKey = "",
    var_dir: VarDir = Path(".var"),
) -> None:
    """Upload an adapter. It is checked against the base model, tensor by tensor, before the name works."""
    with errors(), Api(gateway(url, var_dir), api_key=api_key) as api, bars() as progress:
        total = sum(path.stat().st_size for path in adapter_files(directory))
        task = progress.add_task(f"uploading {name}", total=total)

        def on_bytes(count: int) -> None:
            progress.advance(task, count)
            if progress.tasks[task].finished:
                progress.update(task, description=f"checking {name}")

        record = api.push(name, directory, replace=replace, on_bytes=on_bytes)
    out.print(f"{record['name']} {record['digest']}")


@app.command(name="ls")
def list_adapters(
    *, as_json: AsJson = False, url: Url = "", api_key: ApiKey = "", var_dir: VarDir = Path(".var")
) -> None:
    """List the adapters."""
    with errors(), Api(gateway(url, var_dir), api_key=api_key) as api:
        records = api.adapters()
    if as_json:
        out.print_json(json.dumps(records))
        return
    show_table(table_of(records))


@app.command()
def show(name: Named, *, url: Url = "", api_key: ApiKey = "", var_dir: VarDir = Path(".var")) -> None:
    """Show all that is known of an adapter, as JSON."""
    with errors(), Api(gateway(url, var_dir), api_key=api_key) as api:
        record = api.adapter(name)
    out.print_json(json.dumps(record))


@app.command(name="rm")
def remove(name: Named, *, url: Url = "", api_key: ApiKey = "", var_dir: VarDir = Path(".var")) -> None:
    """Remove an adapter. Requests that run with it finish."""
    with errors(), Api(gateway(url, var_dir), api_key=api_key) as api:
        api.remove(name)
    out.print(f"removed {name}", markup=False)


@app.command(name="demo")
def push_demo(model: DemoModel, *, url: Url = "", api_key: ApiKey = "", var_dir: VarDir = Path(".var")) -> None:
    """Register the demo adapters of a demo model; names that are in use are left alone."""
    with errors(), Api(gateway(url, var_dir), api_key=api_key) as api:
        demo.register(api, model, None)
    out.print(" ".join(adapter.name for adapter in demo.adapters_of(model)) or f"{model} has no demo adapters")


def table_of(records: list[Json]) -> Table:
    """Adapters as a table; digests are cut where they still tell them apart."""
    table = Table("name", "version", "digest", "base", "state", "rank", "size", box=None, pad_edge=False)
    for record in records:
        table.add_row(
            record["name"],
            str(record["version"]),
            _cut_digest(record["digest"]),
            _cut_digest(str(record["base"])),
            str(record["state"]),
            str(record["max_rank"]),
            in_bytes(record["bytes"]),
        )
    return table


def _cut_digest(text: str) -> str:
    """A digest at the length that tells it apart; a name as it is. A base not served has only its digest."""
    return text[:19] if text.startswith("sha256:") else text
