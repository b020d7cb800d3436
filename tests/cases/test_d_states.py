"""Class D, what is told of an adapter: the state that it is in, on every process that tried."""

import asyncio
import io
from collections import Counter
from typing import Any

import pytest

from infinilora.protocol import keys
from infinilora.protocol.ids import Digest
from support.cases import PROMPT, Change, Files, config, keyed, modules
from support.worlds import World, error_of, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

GROUPS = ("lora-0", "lora-1")
TIMES = 60


class Stored:
    """An adapter's packed file where it lies in the store."""

    def __init__(self, world: World, digest: str) -> None:
        self._client, self._bucket = world.store()
        self.name = keys.packed(Digest(digest))
        answer = self._client.get_object(self._bucket, self.name)
        with answer:
            self._whole = answer.read()

    def damage(self) -> None:
        """One bit of its last block."""
        self._put(self._whole[:-8] + bytes([self._whole[-8] ^ 1]) + self._whole[-7:])

    def mend(self) -> None:
        self._put(self._whole)

    def _put(self, data: bytes) -> None:
        self._client.put_object(self._bucket, self.name, io.BytesIO(data), len(data))


async def failing(world: World, name: str, seed: int) -> tuple[Files, list[Change], Stored]:
    """An adapter that both groups have failed to load, as its state says with the reason of each."""
    loras = world.oracle.loras(modules("q_proj", "v_proj"), seed=seed)
    files = Files(config(), keyed(loras))
    entry = await world.register(files, name=name)
    assert (entry["state"], entry["places"]) == ("pending", [])
    stored = Stored(world, entry["digest"])
    stored.damage()
    assert await ask(world, name) == "adapter_failed"
    entry = await until(world, name, "failed", places=len(GROUPS))
    assert {(place["on"], place["code"]) for place in entry["places"]} == {(on, "adapter_failed") for on in GROUPS}
    assert entry["state_reason"].startswith("adapter_failed: ")
    return files, world.oracle.merge(loras, 2.0), stored


async def ask(world: World, name: str) -> str:
    """The code of the refusal, or nothing."""
    answer = await world.api.http.post("/v1/completions", json={"model": name, "prompt": PROMPT, "max_tokens": 1})
    return "" if answer.is_success else str(error_of(answer, [424])["code"])


async def until(world: World, name: str, state: str, *, places: int) -> dict[str, Any]:
    return await world.api.wait(
        f"/v1/adapters/{name}", lambda told: (told["state"], len(told["places"])) == (state, places), within_s=30
    )


async def served_at_last(world: World, name: str, changes: list[Change]) -> None:
    async with asyncio.timeout(60):
        while await ask(world, name):
            await asyncio.sleep(0.05)
    await world.serves(name, changes)
    assert "ready" in {place["state"] for place in (await until_ready(world, name))["places"]}


async def until_ready(world: World, name: str) -> dict[str, Any]:
    """As it is told in both lists, once the group's beat has come."""
    entry = await world.api.wait(f"/v1/adapters/{name}", lambda told: told["state"] == "ready", within_s=30)
    models = (await world.api.http.get("/v1/models")).json()["data"]
    assert next(model["state"] for model in models if model["id"] == name) == "ready"
    assert entry["state_reason"] is None
    return entry


@on("L/fails")
async def test_d18_the_state_is_the_real_one(running: World) -> None:
    assert running.proxy is not None
    await running.factory.stack.set_groups(len(GROUPS))
    await running.factory.fleet(lambda fleet: len(ready_groups(fleet)) == len(GROUPS), within_s=60)
    _, changes, stored = await failing(running, "d18", 180)
    before = len(running.proxy.asked("GET", stored.name))
    states = set()
    for _ in range(TIMES):
        assert await ask(running, "d18") == "adapter_failed"
        states.add((await running.api.http.get("/v1/adapters/d18")).json()["state"])
    assert states <= {"failed", "loading"}
    ranges = Counter(seen.headers["range"] for seen in running.proxy.asked("GET", stored.name)[before:])
    assert max(ranges.values()) < TIMES // 2, "each request had both groups read it anew"
    stored.mend()
    await served_at_last(running, "d18", changes)


@on("L/fails")
async def test_d18_registering_it_again_mends_what_lies_damaged_in_the_store(running: World) -> None:
    await running.factory.stack.set_groups(len(GROUPS))
    await running.factory.fleet(lambda fleet: len(ready_groups(fleet)) == len(GROUPS), within_s=60)
    files, changes, _ = await failing(running, "d18-again", 181)
    entry = await running.register(files, name="d18-again")
    assert entry["changed"] is False
    await served_at_last(running, "d18-again", changes)


def ready_groups(fleet: dict[str, Any]) -> list[str]:
    return [m["group"] for m in fleet["members"] if m["group"] and (m["state"], m["health"]) == ("ready", "alive")]
