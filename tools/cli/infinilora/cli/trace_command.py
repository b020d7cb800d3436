"""`infinilora bench trace`: what engine and LoRA server do when, under a short load, as a timeline for Perfetto."""

import asyncio
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import msgspec
import typer
from rich.table import Table

from infinilora.cli import models
from infinilora.cli.api import Api, Wish
from infinilora.cli.model_commands import prepared
from infinilora.cli.options import VarDir
from infinilora.cli.settings import child_env
from infinilora.cli.stack import Stack
from infinilora.cli.terminal import err, errors, out, show_table
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import InvalidRequest, Unavailable

Model = Annotated[str, typer.Option("--model", help=f"{', '.join(models.DEMO_MODELS)}, or a Hugging Face directory.")]
Adapters = Annotated[int, typer.Option("--adapters", min=0, help="Random ones, on all linear layers; 0: base alone.")]
Rank = Annotated[int, typer.Option("--rank", min=1, help="Of each.")]
Streams = Annotated[int, typer.Option("--streams", min=1, help="Requests at one time.")]
Prompt = Annotated[int, typer.Option("--prompt", min=1, help="Tokens of each prompt.")]
Tokens = Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each answer.")]
Lora = Annotated[Literal["remote", "local"], typer.Option("--lora", help="Where: a LoRA server, or the engine.")]
PingPong = Annotated[
    Literal["off", "auto", "on"], typer.Option("--ping-pong", help="Halves of a step that take turns.")
]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Cores for the engine's step; 0: all.")]
Out = Annotated[Path, typer.Option("--out", help="The file to write, for ui.perfetto.dev.")]
Picture = Annotated[Path | None, typer.Option("--picture", help="Draw a layer of a decode step into FILE.svg.")]

SEED = 5


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the system."""

    adapters: int
    rank: int
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
        for file in filter(None, (out_file, picture)):
            if not file.absolute().parent.is_dir():
                raise InvalidRequest(f"found no directory {file.absolute().parent}; wanted one to write {file.name} to")
        out_file.unlink(missing_ok=True)  # what is read afterwards is this run's
        if model in models.DEMO_MODELS:
            prepared(model, var_dir)
        directory, load = models.find_model(model, var_dir), Load(adapters, rank, streams, prompt, tokens)
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
                on_event=lambda name, event: err.print(f"{name} {event}"),
            )
            asyncio.run(_run(stack, make_adapters(directory, here / "adapters", load), load))
        bars = timeline.read(out_file)
        parts = timeline.parts_of(bars)
        table = Table("part", "ms", "of a step", title=f"{parts.steps} decode steps, on average")
        for name, ms, share in parts.rows():
            table.add_row(name, f"{ms:.2f}", f"{share:.0%}")
        show_table(table)
        if picture is not None:
            picture.write_text(timeline.draw(bars, *timeline.one_layer(bars)), encoding="utf-8")
        out.print(f"{out_file}: open it at https://ui.perfetto.dev")


def make_adapters(model: Path, into: Path, load: Load) -> dict[str, Path]:
    """Random adapters for the model, by name. Reading its shapes takes torch, and so a process of its own."""
    from infinilora.weights.synth import write_peft_adapter

    command = [sys.executable, "-m", "infinilora.engine.prepare", str(model)]
    done = subprocess.run(command, capture_output=True, env=child_env(), check=False)  # noqa: S603 - ours
    if done.returncode:
        raise Unavailable(f"reading {model} ended with status {done.returncode}: {done.stderr.decode()[-500:]}")
    card = msgspec.json.decode(done.stdout, type=BaseCard)
    names = [f"adapter-{number}" for number in range(load.adapters)]
    return {
        name: write_peft_adapter(into / name, card, rank=load.rank, seed=seed, dtype="BF16", std=0.02)
        for seed, name in enumerate(names)
    }


async def _run(stack: Stack, adapters: dict[str, Path], load: Load) -> None:
    """Start, register, ask, stop: the engine writes its timeline as it ends."""
    await stack.start()
    try:
        await asyncio.to_thread(register, stack, adapters)
        from infinilora.bench.load import Ask, run_together

        names, dice = list(adapters) or ["base"], random.Random(SEED)  # noqa: S311 - no secret
        asks = [
            Ask(names[n % len(names)], [dice.randrange(3, 100) for _ in range(load.prompt)], load.tokens)
            for n in range(load.streams)
        ]
        await run_together(stack.url, asks)
    finally:
        await stack.stop()


def register(stack: Stack, adapters: dict[str, Path]) -> None:
    with Api(stack.url) as api:
        for name, directory in adapters.items():
            api.push(directory, Wish(name), on_bytes=lambda _: None)
