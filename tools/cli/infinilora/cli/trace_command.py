"""`infinilora bench trace`: what engine and LoRA server do when, under a short load, as a timeline for Perfetto."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer
from rich.table import Table

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
from infinilora.cli.terminal import errors, out, show_table
from infinilora.protocol.errors import InvalidRequest

Streams = Annotated[int, typer.Option("--streams", min=1, help="Requests at one time.")]
Tokens = Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each answer.")]
PingPong = Annotated[
    Literal["off", "auto", "on"], typer.Option("--ping-pong", help="Halves of a step that take turns.")
]
Out = Annotated[Path, typer.Option("--out", help="The file to write, for ui.perfetto.dev.")]
Picture = Annotated[Path | None, typer.Option("--picture", help="Draw a layer of a decode step into FILE.svg.")]

SEED = 5


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the system."""

    streams: int
    prompt: int
    tokens: int


def trace(  # noqa: PLR0913 - each is an option
    *,
    model: Model = "smollm2-135m",
    adapters: Adapters = 4,
    rank: Rank = 16,
    streams: Streams = 8,
    prompt: Prompt = 16,
    tokens: Tokens = 32,
    lora: Lora = "remote",
    ping_pong: PingPong = "off",
    threads: Threads = 0,
    out_file: Out = Path("trace.json"),
    picture: Picture = None,
    var_dir: VarDir = Path(".var"),
) -> None:
    """Run a short load on a system of its own, and write a timeline of its steps: open it at ui.perfetto.dev."""
    from infinilora.bench import timeline

    with errors():
        if picture is not None and picture.suffix != ".svg":
            raise InvalidRequest(f"found {picture.name}; wanted a name that ends in .svg", param="picture")
        check_writable(*filter(None, (out_file, picture)))
        out_file.unlink(missing_ok=True)  # what is read afterwards is this run's
        directory, load = ready_model(model, var_dir), Load(streams, prompt, tokens)
        env = {"INFINILORA_TIMELINE": str(out_file.absolute()), "INFINILORA_PING_PONG": ping_pong}
        with TemporaryDirectory(prefix="infinilora-trace-") as home:
            here = Path(home)
            stack = Stack(
                here / "var",
                model=str(directory),
                served_name="base",
                lora=lora,
                threads=threads or None,
                extra_env=env,
                on_event=say,
            )
            made = make_adapters(directory, here / "adapters", count=adapters, rank=rank)
            asyncio.run(_run(stack, made, load))
        bars = timeline.read(out_file)
        parts = timeline.parts_of(bars)
        table = Table("part", "ms", "of a step", title=f"{parts.steps} decode steps, on average")
        for name, ms, share in parts.rows():
            table.add_row(name, f"{ms:.2f}", f"{share:.0%}")
        show_table(table)
        if picture is not None:
            picture.write_text(timeline.draw(bars, *timeline.one_layer(bars)), encoding="utf-8")
        out.print(f"{out_file}: open it at https://ui.perfetto.dev")


async def _run(stack: Stack, adapters: dict[str, Path], load: Load) -> None:
    """Ask all at once, and stop: the engine writes its timeline as it ends."""
    from infinilora.bench.load import Ask, run_together

    names, dice = list(adapters) or ["base"], random.Random(SEED)  # noqa: S311 - no secret
    asks = [
        Ask(names[n % len(names)], [dice.randrange(3, 100) for _ in range(load.prompt)], load.tokens)
        for n in range(load.streams)
    ]
    async with running(stack, adapters):
        await run_together(stack.url, asks)
