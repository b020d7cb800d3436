"""`infinilora bench record`: what the requests of an open-loop run saw, for `infinilora simulate compare`."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from infinilora.cli.model_commands import ready_model
from infinilora.cli.options import Model, VarDir
from infinilora.cli.own_system import (
    Adapters,
    Lora,
    Prompt,
    Rank,
    Threads,
    check_writable,
    make_adapters,
    running,
    say,
)
from infinilora.cli.stack import Stack
from infinilora.cli.terminal import errors, out

if TYPE_CHECKING:
    from infinilora.bench.record import Arrivals

Rate = Annotated[float, typer.Option("--rate", min=0.001, help="Requests a second, arriving at random.")]
Requests = Annotated[int, typer.Option("--requests", min=2, help="How many.")]
Zipf = Annotated[float, typer.Option("--zipf", min=0, help="The i-th adapter is asked for in proportion to i^-ZIPF.")]
Tokens = Annotated[int, typer.Option("--tokens", min=2, help="Of an answer on average; from half to three halves.")]
Engines = Annotated[int, typer.Option("--engines", min=1, help="Of the base.")]
Seed = Annotated[int, typer.Option("--seed", help="Of arrivals, lengths and popularity.")]
Out = Annotated[Path, typer.Option("--out", help="The file to write.")]


def record(  # noqa: PLR0913 - each is an option
    *,
    model: Model = "smollm2-135m",
    adapters: Adapters = 8,
    rank: Rank = 16,
    rate: Rate = 2.0,
    requests: Requests = 200,
    zipf: Zipf = 1.2,
    prompt: Prompt = 32,
    tokens: Tokens = 48,
    lora: Lora = "remote",
    engines: Engines = 1,
    threads: Threads = 0,
    seed: Seed = 1,
    out_file: Out = Path("record.json"),
    var_dir: VarDir = Path(".var"),
) -> None:
    """Run a load that arrives at random on a system of its own, and write down what each request saw."""
    from infinilora.bench.record import Arrivals

    arrivals = Arrivals(
        rate=rate, requests=requests, adapters=adapters, zipf=zipf, prompt=prompt, tokens=tokens, seed=seed
    )
    with errors():
        check_writable(out_file)
        directory = ready_model(model, var_dir)
        with TemporaryDirectory(prefix="infinilora-record-") as home:
            here = Path(home)
            made = make_adapters(directory, here / "adapters", count=adapters, rank=rank)
            stack = Stack(
                here / "var",
                model=str(directory),
                served_name="base",
                lora=lora,
                engines=engines,
                threads=threads or None,
                on_event=say,
            )
            rows = asyncio.run(_run(stack, made, arrivals))
            sizes = [(path / "adapter_model.safetensors").stat().st_size for path in made.values()]
        mode = "coupled" if lora == "local" else "disaggregated"
        fleet = {"mode": mode, "engines": engines, "is_pool_warm": True}
        told = {"requests": rows, "fleet": fleet, "adapter_bytes": sizes, "arrivals": msgspec.to_builtins(arrivals)}
        out_file.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1))
        out.print(f"{out_file}: {len(rows)} requests; hold a simulation against it: infinilora simulate compare")


async def _run(stack: Stack, adapters: dict[str, Path], arrivals: "Arrivals") -> list[dict[str, float]]:
    """Warm every adapter once, then play."""
    from infinilora.bench.load import Ask, run_together
    from infinilora.bench.record import plan, play

    names = list(adapters)
    async with running(stack, adapters):
        for name in names or ["base"]:
            await run_together(stack.url, [Ask(name, [5] * arrivals.prompt, 2)])
        return await play(stack.url, plan(arrivals), names, "base")
