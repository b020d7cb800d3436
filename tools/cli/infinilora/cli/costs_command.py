"""`infinilora bench costs`: what steps, deltas and loads take on this machine, for `infinilora simulate`."""

import asyncio
import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import httpx
import msgspec
import typer
from msgspec.structs import replace
from rich.table import Table

from infinilora.cli.model_commands import ready_model
from infinilora.cli.options import Model, VarDir
from infinilora.cli.own_system import Rank, Threads, check_writable, make_adapters, running, say
from infinilora.cli.stack import Stack
from infinilora.cli.terminal import errors, out, show_table

if TYPE_CHECKING:  # numpy takes a tenth of a second to import, which the other commands need not spend
    from infinilora.bench.costs import Meter, Point
    from infinilora.planner.simulate.costs import Costs

ADAPTERS = 8
COLD, COLD_RANKS = 2, (4, 8)
"""Adapters of each rank, in times of --rank, that are asked for once: large, so that a load outlasts a step."""
STREAMS = (1, 2, 4, 8, 16)
PROMPTS = (8, 32, 64, 128, 256)
JOINED = ((1, 32), (2, 64), (3, 16), (4, 32), (6, 32))
"""Streams that decode, and the prompt that joins them."""
LONG_PROMPT = 480
"""Of streams that show what context takes."""
TIMES = 4
AS_LOCAL = "as local: the same kernels in another process"

Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Everything is measured so often.")]
Tokens = Annotated[int, typer.Option("--tokens", min=8, help="Of each stream.")]
Out = Annotated[Path, typer.Option("--out", help="The file to write.")]


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one system. `cold`: bytes of an adapter, and its first token ever."""

    points: "list[Point]"
    cold: list[tuple[int, float]]


def costs(
    *,
    model: Model = "smollm2-135m",
    rank: Rank = 16,
    threads: Threads = 0,
    rounds: Rounds = 2,
    tokens: Tokens = 48,
    out_file: Out = Path("costs.json"),
    var_dir: VarDir = Path(".var"),
) -> None:
    """Measure systems without adapters, with them in the engine, and in a LoRA server; fit the costs of their steps."""
    from infinilora.planner.simulate.costs import write_costs

    with errors():
        check_writable(out_file)
        directory, threads = ready_model(model, var_dir), threads or os.cpu_count() or 1
        with TemporaryDirectory(prefix="infinilora-costs-") as home:
            here = Path(home)
            warm = make_adapters(directory, here / "warm", count=ADAPTERS, rank=rank)
            cold = {
                f"cold-{times}-{name}": made
                for times in COLD_RANKS
                for name, made in make_adapters(directory, here / str(times), count=COLD, rank=rank * times).items()
            }
            found = {}
            for lora in ("none", "local", "remote"):
                stack = Stack(
                    here / lora,
                    model=str(directory),
                    served_name="base",
                    lora=lora,
                    threads=threads,
                    on_event=say,
                )
                adapters = warm if lora != "none" else {}
                colder = cold if lora == "remote" else {}
                found[lora] = asyncio.run(_measure(stack, adapters, colder, rounds, tokens))
            adapter_bytes = sum(map(_size, warm.values())) / ADAPTERS
        words = f"{directory.name} on {_cpu()}, threads: {threads}; adapters of rank {rank} on all linears"
        fitted = fit(found, directory, adapter_bytes, words)
        write_costs(fitted, out_file)
    _show(fitted)
    out.print(f"written to {out_file}", markup=False)


async def _measure(stack: Stack, warm: dict[str, Path], cold: dict[str, Path], rounds: int, tokens: int) -> Measured:
    from infinilora.bench.costs import Meter

    async with running(stack, warm | cold), httpx.AsyncClient(base_url=stack.url, timeout=600) as http:
        meter = Meter(http, list(warm), base="base", seed=len(warm))
        for name in list(warm) or ["base"]:
            await meter.first(name, PROMPTS[0])
        points = [point for _ in range(rounds) for point in await _round(meter, len(warm), tokens)]
        return Measured(points, [(_size(path), await meter.first(name, PROMPTS[0])) for name, path in cold.items()])


async def _round(meter: "Meter", num_adapters: int, tokens: int) -> "list[Point]":
    points = [await meter.decode(streams, tokens=tokens) for streams in STREAMS]
    if num_adapters:
        points += [await meter.decode(streams, tokens=tokens, names=1) for streams in STREAMS[2:]]
    points.append(await meter.decode(2, tokens=2 * tokens, prompt=LONG_PROMPT))
    points += [await meter.alone(prompt, times=TIMES) for prompt in PROMPTS]
    points += [await meter.joined(streams, prompt, tokens=3 * tokens) for streams, prompt in JOINED]
    return points


def fit(found: dict[str, Measured], model: Path, adapter_bytes: float, words: str) -> "Costs":
    """The committed costs, with all that was measured in their place, and what follows from the model's shapes."""
    from infinilora.planner.constants import Constant
    from infinilora.planner.simulate.costs import CPU_FILE, DeltaCost, read_costs
    from infinilora.planner.simulate.fit import Seen, fit_base, fit_deltas, fit_load

    share, row_bytes = _shapes(model)
    known = replace(read_costs(CPU_FILE), read_share=Constant(share, "top_k / experts of the base; 1: dense"))

    def seen(points: "list[Point]") -> list[Seen]:
        read = [known.read_bytes(p.rows, p.adapters * adapter_bytes, p.adapters) for p in points]
        return [
            Seen(p.seconds, p.rows, p.tokens, p.context, p.is_first, num_bytes, p.asks_lease)
            for p, num_bytes in zip(points, read, strict=True)
        ]

    source = f"measured by `infinilora bench costs` on {datetime.now(UTC).date().isoformat()}"
    base = fit_base(seen(found["none"].points), source)
    local, _ = fit_deltas(seen(found["local"].points), base, source, has_lease=False)
    remote, lease_s = fit_deltas(seen(found["remote"].points), base, source, has_lease=True)
    way_s = base.gateway_s.value + lease_s.value
    cold = [(num_bytes, max(seconds - way_s, 1e-4)) for num_bytes, seconds in found["remote"].cold]
    latency_s, store_bytes_per_s = fit_load(cold, source)
    return replace(
        known,
        name=words,
        is_measured=True,
        base=base.cost,
        local=local,
        remote=remote,
        service=DeltaCost(*(Constant(number.value, AS_LOCAL) for number in msgspec.structs.astuple(local))),
        load=replace(known.load, latency_s=latency_s, store_bytes_per_s=store_bytes_per_s),
        gateway_s=base.gateway_s,
        lease_s=lease_s,
        wire_bytes_per_row=Constant(row_bytes, "computed: what all sites of all layers send and get back, in fp32"),
    )


def _shapes(model: Path) -> tuple[float, float]:
    """Of an adapter on all linears: the share that one row reads, and what a row sends and gets back."""
    from infinilora.planner.geometry import TARGETS, find_base

    sites = [site for layer in find_base(str(model), frozenset(TARGETS)).layers for site in layer]
    share = min((site.top_k / site.experts for site in sites if site.experts), default=1.0)
    return share, 4.0 * sum(site.sent + site.returned for site in sites)


def _size(adapter: Path) -> int:
    return (adapter / "adapter_model.safetensors").stat().st_size


def _cpu() -> str:
    """The processor, as its maker calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _show(fitted: "Costs") -> None:
    from infinilora.planner.simulate.costs import constants_of

    table = Table("cost", "value", "source", box=None, pad_edge=False)
    for name, constant in constants_of(fitted):
        table.add_row(name, f"{constant.value:.4g}", constant.source)
    show_table(table)
