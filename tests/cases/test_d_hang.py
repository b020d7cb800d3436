"""Class D, what does not come back: a step, a site call, and whoever holds the interpreter while it hangs."""

import asyncio
from typing import Any

import httpx
import pytest

from support.cases import Change
from support.hangs import FREE, HOLDING, Hangs
from support.worlds import World, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

ENGINES = ("engine", "engine.1")


async def started_again(world: World, names: tuple[str, ...], before: dict[str, int | None]) -> str:
    """The one of these programs that has ended by itself, once all of them are ready again."""
    stack = world.factory.stack
    async with asyncio.timeout(60):
        while not (other := [name for name in names if stack.pid(name) not in (before[name], None)]):
            await asyncio.sleep(0.05)
    await world.factory.fleet(lambda fleet: len(ready(fleet)) == len(ENGINES) + 1, within_s=60)
    (name,) = other
    return name


def ready(fleet: dict[str, Any]) -> list[dict[str, Any]]:
    """Engines and LoRA servers that take work."""
    told = (m for m in fleet["members"] if m["kind"] in ("engine", "lora-server"))
    return [m for m in told if (m["state"], m["health"]) == ("ready", "alive")]


@pytest.mark.parametrize("how", [FREE, HOLDING])
@on("L/hang")
async def test_d21_a_step_that_hangs(running: World, how: str) -> None:
    changes = await running.made(f"d21-{how[:4]}", 210)
    await running.serves(f"d21-{how[:4]}", changes)
    before, hangs = running.factory.stack.pids(), Hangs(running.root / "hangs")
    hangs.order("engine", how)
    streams = [asyncio.create_task(running.serves(f"d21-{how[:4]}", changes)) for _ in range(16)]
    if how == FREE:  # else it has no voice
        await running.factory.fleet(lambda fleet: any(m["state"] == "stuck" for m in fleet["members"]), within_s=60)
    await asyncio.gather(*streams)
    assert hangs.is_taken("engine")
    stuck = await started_again(running, ENGINES, before)
    log = running.factory.stack.log(stuck).read_text()
    assert ("stuck: nothing has moved" if how == FREE else "Timeout (") in log
    assert "hang_if_told" in log, "where it hangs"


@on("L/hang")
async def test_d21_a_site_call_that_hangs(running: World) -> None:
    changes = await running.made("d21-call", 211)
    await running.serves("d21-call", changes)
    before, hangs = running.factory.stack.pids(), Hangs(running.root / "hangs")
    hangs.order("lora-server")
    await asyncio.gather(*(right_at_last(running, "d21-call", changes) for _ in range(8)))
    assert hangs.is_taken("lora-server")
    assert await started_again(running, ("lora-server",), before) == "lora-server"
    await running.serves("d21-call", changes)
    assert "hang_if_told" in running.factory.stack.log("lora-server").read_text()
    assert {name: pid for name, pid in running.factory.stack.pids().items() if name != "lora-server"} == {
        name: pid for name, pid in before.items() if name != "lora-server"
    }


async def right_at_last(world: World, name: str, changes: list[Change]) -> None:
    """Ask as a client does who is told that it may: never anything but a retryable refusal, or what is right."""
    async with asyncio.timeout(90):
        while True:
            try:
                await world.serves(name, changes)
            except httpx.HTTPStatusError as error:
                assert error.response.status_code in (424, 503), error.response.text
                await asyncio.sleep(float(error.response.headers.get("retry-after", 0.2)))
            else:
                return
