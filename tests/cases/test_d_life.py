"""Class D, lives of processes: what was registered outlives every one of them, with its versions."""

import asyncio

import httpx
import pytest

from support.api import Api
from support.cases import Change, Files, config, keyed, modules
from support.worlds import World, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")


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
