"""`infinilora up`: everything on this machine, from nothing to a URL, until Ctrl-C."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from infinilora.cli import demo
from infinilora.cli.api import Api
from infinilora.cli.follow import Range, follow
from infinilora.cli.model_commands import ready_model
from infinilora.cli.options import Model, VarDir
from infinilora.cli.stack import Stack, Urls, check_layout
from infinilora.cli.terminal import err, errors, out
from infinilora.cli.welcome import speech_of, welcome
from infinilora.protocol.errors import InvalidRequest

Served = Annotated[str, typer.Option("--served-name", help="What clients call the base model.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the HTTP API; 0: any that is free.")]
Lora = Annotated[str, typer.Option("--lora", help="remote: in a LoRA server. local: in the engine. none: base only.")]
LoraShape = Annotated[
    str,
    typer.Option(
        "--lora-shape", help="Processes of the LoRA server: ExL, experts cut E ways and layers L ways; or auto."
    ),
]
Engines = Annotated[int, typer.Option("--engines", min=1, help="Engines of the base model; they share the threads.")]
MinEngines = Annotated[
    int | None,
    typer.Option(
        "--min-engines",
        min=0,
        help="Engines go when few requests come, down to so many. 0: the next request brings one back.",
    ),
]
MaxEngines = Annotated[
    int | None, typer.Option("--max-engines", min=1, help="More engines come with the load, up to so many.")
]
MinGroups = Annotated[
    int | None, typer.Option("--min-groups", min=0, max=1, help="0: no LoRA server either while nobody comes.")
]
MaxGroups = Annotated[
    int | None, typer.Option("--max-groups", min=1, help="More LoRA servers come with the load, up to so many.")
]
Shards = Annotated[
    str, typer.Option("--shards", help="Processes of the engine, each with a part of the model, or auto.")
]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Cores for the engines' steps; 0: all.")]
Nats = Annotated[str, typer.Option("--nats", help="A NATS server of yours: nats://user:password@host:port.")]
Redis = Annotated[str, typer.Option("--redis", help="A Redis server of yours: redis://:password@host:port/0.")]
Store = Annotated[
    str,
    typer.Option(
        "--store",
        help="A store of yours: s3://bucket?endpoint=http://host:port (keys: INFINILORA_S3_ACCESS_KEY and "
        "INFINILORA_S3_SECRET_KEY), or file:///directory.",
    ),
]

Scaling = Callable[[], Awaitable[None]]
NAMES = {"store": "object store", "nats": "NATS", "redis": "Redis"}


def up(  # noqa: PLR0913 - each is an option
    *,
    model: Model = "smollm2-135m",
    served_name: Served = "",
    port: Port = 8000,
    lora: Lora = "remote",
    lora_shape: LoraShape = "1x1",
    engines: Engines = 1,
    shards: Shards = "1",
    min_engines: MinEngines = None,
    max_engines: MaxEngines = None,
    min_groups: MinGroups = None,
    max_groups: MaxGroups = None,
    threads: Threads = 0,
    nats: Nats = "",
    redis: Redis = "",
    store: Store = "",
    var_dir: VarDir = Path(".var"),
) -> None:
    """Start NATS, Redis, S3 and the four services here, serve a model, and stop all of it on Ctrl-C."""
    started = time.perf_counter()

    def on_event(name: str, event: str) -> None:
        stamp = f"[dim]{time.perf_counter() - started:6.1f} s[/dim]"
        color = "green" if event == "ready" else "yellow"
        err.print(f"{stamp}  {NAMES.get(name, name):13} [{color}]{event}[/{color}]")

    with errors():
        scales = range_of(engines, min_engines, max_engines, min_groups, max_groups)
        check_layout(lora=lora, lora_shape=lora_shape, engine_shards=shards)
        ready_model(model, var_dir)
        stack = Stack(
            var_dir,
            model=model,
            served_name=served_name,
            port=port,
            lora=lora,
            lora_shape=lora_shape,
            engines=engines,
            engine_shards=shards,
            threads=threads or None,
            urls=Urls(nats, redis, store),
            extra_env=scales.settings() if scales else None,
            on_event=on_event,
        )
        asyncio.run(_live(stack, partial(follow, stack, on_event, within=scales) if scales else None))
    err.print("stopped")


def range_of(
    engines: int, min_engines: int | None, max_engines: int | None, min_groups: int | None, max_groups: int | None
) -> Range | None:
    """How many there may be of each; None where no limit is given: then their numbers stay. Raises InvalidRequest."""
    if all(limit is None for limit in (min_engines, max_engines, min_groups, max_groups)):
        return None
    least = engines if min_engines is None else min_engines
    most = engines if max_engines is None else max_engines
    if not least <= engines <= most:
        given = f"--min-engines is {least}, --engines {engines} and --max-engines {most}"
        raise InvalidRequest(f"{given}; wanted none smaller than the one before", param="engines")
    return Range((least, most), (1 if min_groups is None else min_groups, max_groups or 1))


async def _live(stack: Stack, scaling: Scaling | None) -> None:
    """Run the system until a signal; the second signal kills what the first one did not stop.

    With `scaling`, in as many processes as the coordinator decides.
    """
    loop, body = asyncio.get_running_loop(), asyncio.current_task()
    assert body is not None  # noqa: S101 - this is a coroutine, so it runs in one

    def on_signal() -> None:
        if body.cancelling():
            stack.end()
        else:
            err.print("\nstopping; once more to kill")
            body.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        await _serve(stack, scaling)
    except asyncio.CancelledError:
        body.uncancel()  # it was asked for, and all is stopped


async def _serve(stack: Stack, scaling: Scaling | None) -> None:
    try:
        await stack.start()
        await asyncio.to_thread(_register_demo, stack)
        out.print(welcome(stack.url, stack.served_name, speech_of(stack.model)))
        if scaling:
            await scaling()
        await asyncio.Event().wait()
    finally:
        await stack.stop()


def _register_demo(stack: Stack) -> None:
    with Api(stack.url) as api:
        demo.register(api, stack.served_name, stack.home.directory / "demo.json")
