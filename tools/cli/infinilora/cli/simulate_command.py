"""`infinilora simulate`: a fleet in virtual time, under the services' own policies. Needs no server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from infinilora.cli.options import AsJson
from infinilora.cli.terminal import errors, in_bytes, out, show_table

if TYPE_CHECKING:  # numpy takes a tenth of a second to import, which the other commands need not spend
    from infinilora.planner.simulate.compare import Compared, Served
    from infinilora.planner.simulate.published import Row

app = typer.Typer(help="Play a load on a fleet in virtual time; docs/planning.md.")

ScenarioFile = Annotated[
    Path | None, typer.Option("--scenario", help="A JSON file: fleet, load, slo, adapter_bytes, costs.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change one place of it: fleet.engines=8, load.rate=20.")]
Ways = Annotated[str, typer.Option("--ways", help="Compare: coupled:load,coupled:home,disaggregated,hybrid.")]
Search = Annotated[bool, typer.Option("--search", help="Find the largest rate within the SLO, from load.rate on.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, lengths and popularity.")]
Picture = Annotated[Path | None, typer.Option("--picture", help="Draw the distribution of TTFT into FILE.svg.")]
Models = Annotated[str, typer.Option("--models", help="Some of them, with commas; all if empty.")]
Requests = Annotated[int, typer.Option("--requests", min=100, help="Of each run at least.")]
CostsFile = Annotated[str, typer.Option("--costs", help="cpu, or a JSON file.")]
Records = Annotated[list[Path], typer.Argument(help="What `infinilora bench record` wrote.")]


@app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    *,
    scenario: ScenarioFile = None,
    changes: Set = None,
    ways: Ways = "",
    search: Search = False,
    seed: Seed = 1,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Play a load on a fleet in virtual time, and say what its requests saw."""
    if context.invoked_subcommand is not None:
        return
    from infinilora.planner.picture import check_picture
    from infinilora.planner.simulate.compare import run_ways
    from infinilora.planner.simulate.picture import write_picture
    from infinilora.planner.simulate.scenario import read_scenario

    with errors():
        if picture:
            check_picture(picture)
        read = read_scenario(scenario, changes or [])
        served = run_ways(read, read.ways(ways), seed=seed, search=search)
        if picture:
            write_picture(picture, served, read.slo)
    if as_json:
        out.print_json(msgspec.json.encode(served).decode())
    else:
        _show(served, read.read_costs().name)


@app.command()
def published(*, models: Models = "", requests: Requests = 3000, seed: Seed = 1, as_json: AsJson = False) -> None:
    """Search the rates of the published comparison, 512 adapters on 16 GPUs. Takes minutes; nothing is measured."""
    from infinilora.planner.simulate.published import published as rows_of

    with errors():
        rows = rows_of(num_requests=requests, seed=seed, models=_names(models))
    if as_json:
        out.print_json(msgspec.json.encode(rows).decode())
    else:
        _show_published(rows)


@app.command()
def compare(records: Records, *, costs: CostsFile = "cpu", as_json: AsJson = False) -> None:
    """Hold the simulation against recorded runs of the real system: throughput and P95 TTFT within 15 %."""
    from infinilora.planner.simulate.compare import compare as compared
    from infinilora.planner.simulate.scenario import Scenario

    with errors():
        found = [compared(path, Scenario(costs=costs).read_costs()) for path in records]
    if as_json:
        out.print_json(msgspec.json.encode(found).decode())
    else:
        _show_compared(found)


def _names(text: str) -> frozenset[str]:
    from infinilora.planner.simulate.published import read_house
    from infinilora.protocol.errors import InvalidRequest

    names, known = frozenset(filter(None, text.split(","))), [model.name for model in read_house().models]
    if odd := sorted(names - set(known)):
        raise InvalidRequest(f"--models: found {odd[0]!r}; wanted some of {', '.join(known)}")
    return names


def _show(served: "list[Served]", costs: str) -> None:
    heads = ("way", "requests/s", "P50", "P95", "P99 TTFT", "TPOT", "within SLO", "adapters", "Jain", "loads", "staged")
    table = Table(*heads, box=None, pad_edge=False)
    for one in served:
        seen = one.outcome
        if seen is None:
            table.add_row(escape(one.way), "none", *[""] * (len(heads) - 2))
            continue
        table.add_row(
            escape(one.way),
            f"{one.rate:.4g}",
            *(f"{value:.3f}" for value in (seen.ttft_s.p50, seen.ttft_s.p95, seen.ttft_s.p99, seen.tpot_s.mean)),
            f"{seen.requests_within_slo:.3f}",
            f"{seen.adapters_within_slo:.3f}",
            f"{seen.jain:.3f}",
            str(seen.moved.loads),
            in_bytes(seen.moved.staged_bytes),
        )
    show_table(table)
    out.print(f"costs: {costs}", markup=False)


def _show_published(rows: "list[Row]") -> None:
    table = Table("model", "way", "slots", "requests/s", "over coupled:load", "P95 TTFT", box=None, pad_edge=False)
    for row in rows:
        gain = "" if row.gain is None else f"{row.gain:.2f}"
        p95 = "" if row.outcome is None else f"{row.outcome.ttft_s.p95:.3f}"
        table.add_row(row.model, escape(row.way), str(row.slots), f"{row.rate:.4g}", gain, p95)
    show_table(table)
    out.print("simulated with the sizes and speeds of published.json: nothing here is measured", markup=False)


def _show_compared(found: "list[Compared]") -> None:
    heads = ("record", "tokens/s", "predicted", "off", "P95 TTFT", "predicted", "off", "within 15 %")
    table = Table(*heads, box=None, pad_edge=False)
    for one in found:
        table.add_row(
            escape(one.record),
            *(f"{value:.4g}" for value in one.tokens_per_s),
            f"{one.off_tokens:+.1%}",
            *(f"{value:.3f}" for value in one.ttft_p95_s),
            f"{one.off_ttft:+.1%}",
            "yes" if one.is_within else "no",
        )
    show_table(table)
