"""Class D, lives of processes: what was registered outlives every one of them, with its versions."""

import asyncio
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from support.api import Api
from support.cases import Change, Files, config, keyed, modules
from support.worlds import World, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")
SLACK = 4
"""Open files and threads that come and go with connections and readers."""


async def back(world: World, name: str, changes: list[Change]) -> None:
    """Ask until it answers: in between only what may be tried again, never "not found", never the base's numbers."""
    async with asyncio.timeout(60):
        while True:
            try:
                await world.serves(name, changes)
            except httpx.HTTPStatusError as error:
                assert error.response.status_code == 503, error.response.text
                await asyncio.sleep(float(error.response.headers["retry-after"]))
            except httpx.TransportError:
                await asyncio.sleep(0.1)  # the gateway itself is away
            else:
                return


async def whole_system_again(world: World) -> None:
    """Every process ends, servers too, and comes back on the same directory."""
    stack = world.factory.stack
    await stack.stop()
    await stack.start()
    world.api = Api(stack.url)
    world.factory.apis.append(world.api)


@on("L/lives")
async def test_d16_what_was_registered_outlives_every_process(running: World) -> None:
    made = {}
    for seed in range(5):
        loras = running.oracle.loras(QV, seed=160 + seed)
        made[f"d16-{seed}"] = running.oracle.merge(loras, 2.0)
        await running.register(Files(config(), keyed(loras)), name=f"d16-{seed}")
    for name in ("engine", "lora-server", "gateway"):
        running.factory.stack.kill(name)
        for adapter, changes in made.items():
            await back(running, adapter, changes)
    await whole_system_again(running)
    for adapter, changes in made.items():
        await back(running, adapter, changes)


@on("L/lives")
async def test_d31_two_versions_at_once(running: World) -> None:
    changes = {}
    for version in (1, 2):
        loras = running.oracle.loras(QV, seed=310 + version)
        changes[f"d31@v{version}"] = running.oracle.merge(loras, 2.0)
        entry = await running.register(Files(config(), keyed(loras)), name="d31", replace=version == 2)
        changes[f"d31@{entry['digest']}"] = changes[f"d31@v{version}"]
    for name, wanted in changes.items():
        await running.serves(name, wanted)
    await whole_system_again(running)
    for name, wanted in changes.items():
        await back(running, name, wanted)


class Use(NamedTuple):
    """What a process holds."""

    kib: int
    files: int
    threads: int


def uses(world: World) -> dict[str, Use]:
    """Of each of our services; memory is what lies in RAM."""
    found = {}
    for name in ("engine", "lora-server", "gateway", "coordinator"):
        process = Path(f"/proc/{world.factory.stack.pid(name)}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        files = len(list((process / "fd").iterdir()))
        found[name] = Use(int(status["VmRSS"].split()[0]), files, int(status["Threads"]))
    return found


def leftovers(world: World) -> list[str]:
    """Files of uploads and ingests that nobody works on any more."""
    scratch = world.factory.stack.home.directory / "gateway"
    return [str(path) for path in scratch.rglob("*") if path.is_file() and path.suffix != ".lock"]


SOAK = pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])


@pytest.mark.parametrize("cycles", [24, SOAK])
@on("L/two-slots")
async def test_d09_loaded_used_and_unloaded_again(world: World, cycles: int) -> None:
    warm: dict[str, Use] = {}
    for number in range(cycles):
        loras = world.oracle.loras(QV, seed=900 + number % 100)
        await world.register(Files(config(), keyed(loras)), name="d09")
        await world.serves("d09", world.oracle.merge(loras, 2.0))
        assert (await world.api.http.delete("/v1/adapters/d09")).status_code == 200
        if number == cycles // 2:
            warm = uses(world)
    for name, use in uses(world).items():
        before = warm[name]
        assert use.kib <= before.kib * 1.05, f"{name}: {before.kib} KiB grew to {use.kib} KiB"
        assert use.files <= before.files + SLACK, f"{name}: {before.files} open files grew to {use.files}"
        assert use.threads <= before.threads + SLACK, f"{name}: {before.threads} threads grew to {use.threads}"
    assert leftovers(world) == []
