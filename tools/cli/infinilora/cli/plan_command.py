"""`infinilora plan`: how large the LoRA tier must be for a load and an SLO. Needs no server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from infinilora.cli.options import AsJson
from infinilora.cli.terminal import errors, in_bytes, out, show_table

if TYPE_CHECKING:  # numpy takes a tenth of a second to import, which the other commands need not spend
    from infinilora.planner.plan import Plan

Model = Annotated[str, typer.Option("--model", help="A known base model, or a directory with its config.json.")]
Adapters = Annotated[int, typer.Option("--adapters", help="How many there are.")]
Zipf = Annotated[float, typer.Option("--zipf", help="The i-th is asked for in proportion to i^-ZIPF; 0: all alike.")]
Rate = Annotated[float, typer.Option("--rate", help="Requests a second.")]
Residence = Annotated[float, typer.Option("--residence", help="Seconds that a request runs, on average.")]
Rank = Annotated[str, typer.Option("--rank", help="Of the adapters; several (8,16,64) are dealt in turn.")]
WorkloadFile = Annotated[
    Path | None, typer.Option("--workload", help="A JSON file in place of the six options above; docs/planning.md.")
]
Targets = Annotated[
    str, typer.Option("--targets", help="What adapters adapt: all, or some of attention,mlp,experts,shared.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="Of the adapters: BF16, F16 or F32.")]
SloTtft = Annotated[float, typer.Option("--slo-ttft", help="Seconds to the first token, at the share --iar.")]
SloTpot = Annotated[float, typer.Option("--slo-tpot", help="Seconds for each further token.")]
Iar = Annotated[float, typer.Option("--iar", help="Share of requests that are to be admitted at once.")]
Margin = Annotated[float, typer.Option("--margin", help="Slots above what --iar takes, as a share of them.")]
GpuBytes = Annotated[float, typer.Option("--gpu-bytes", help="Bytes that adapters may take on one GPU.")]
GpuPrice = Annotated[float, typer.Option("--gpu-price", help="Of a GPU for an hour; 0: that of --constants.")]
Engines = Annotated[int, typer.Option("--engines", help="Engines of each base; 0: as many as the load takes.")]
Spare = Annotated[int, typer.Option("--spare-groups", help="Groups of each base beyond those needed.")]
ColdFrom = Annotated[str, typer.Option("--cold-from", help="Where adapters outside the pool are: host or store.")]
ConstantsFile = Annotated[
    Path | None, typer.Option("--constants", help="Speeds and prices of other hardware, a JSON file.")
]
Picture = Annotated[Path | None, typer.Option("--picture", help="Draw IAR against slots into FILE.svg.")]


def plan(  # noqa: PLR0913 - each is an option
    *,
    model: Model = "",
    adapters: Adapters = 0,
    zipf: Zipf = 1.2,
    rate: Rate = 0.0,
    residence: Residence = 0.0,
    rank: Rank = "",
    workload: WorkloadFile = None,
    targets: Targets = "all",
    dtype: Dtype = "BF16",
    slo_ttft: SloTtft = 0.25,
    slo_tpot: SloTpot = 0.1,
    iar: Iar = 0.95,
    margin: Margin = 0.1,
    gpu_bytes: GpuBytes = 80e9,
    gpu_price: GpuPrice = 0.0,
    engines: Engines = 0,
    spare_groups: Spare = 0,
    cold_from: ColdFrom = "host",
    constants: ConstantsFile = None,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Say how many slots, groups and shards of LoRA servers a load takes, and what they cost."""
    from infinilora.planner.ask import Wish, answer

    with errors():
        found = answer(
            Wish(
                model=model,
                adapters=adapters,
                zipf=zipf,
                rate=rate,
                residence=residence,
                rank=rank,
                workload=workload,
                targets=targets,
                dtype=dtype,
                slo_ttft=slo_ttft,
                slo_tpot=slo_tpot,
                iar=iar,
                margin=margin,
                gpu_bytes=gpu_bytes,
                gpu_price=gpu_price,
                engines=engines,
                spare_groups=spare_groups,
                cold_from=cold_from,
                constants=constants,
                picture=picture,
            )
        )
    if as_json:
        out.print_json(msgspec.json.encode(found).decode())
    else:
        _show(found)


def _show(found: "Plan") -> None:
    show_table(_table(found))
    out.print()
    for base in found.bases:
        out.print(
            f"{base.model}: {base.in_flight:g} requests in flight on average; first token {base.ttft_s:.3f} s when an "
            f"adapter of {in_bytes(base.adapter_bytes)} must be brought in, each further one {base.tpot_s:.3f} s",
            markup=False,
        )
    out.print(
        f"slots {found.slots} ({found.min_slots} before the margin), groups {found.groups}, shards {found.shards}, "
        f"IAR {found.iar:.4f}, cost {found.cost_per_hour:g} an hour, {found.cost_per_million_requests:.4g} a million "
        "requests",
        markup=False,
    )


def _table(found: "Plan") -> Table:
    heads = ("base", "adapters", "slots", "pool", "IAR", "groups", "EP x LP", "shards")
    table = Table(*heads, box=None, pad_edge=False)
    for base in found.bases:
        table.add_row(
            escape(base.model),
            str(base.adapters),
            str(base.slots),
            in_bytes(base.pool_bytes),
            f"{base.iar:.4f}",
            str(base.groups),
            f"{base.expert_parallel} x {base.layer_parallel}",
            str(base.shards),
        )
    return table
