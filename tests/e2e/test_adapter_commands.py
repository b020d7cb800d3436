"""`infinilora adapter` against a whole system: a name's life from its first push to its removal."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from infinilora.cli.__main__ import app
from infinilora.cli.terminal import REFUSED
from support.cases import Change, Files, Oracle, config, keyed, make_base, modules
from support.stacks import StackFactory
from support.worlds import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


class Commands:
    """The command line of one gateway. Each call runs in a thread, since the system's children need this loop."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self, *arguments: str) -> str:
        done = await self._run(*arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    async def refused(self, *arguments: str) -> str:
        done = await self._run(*arguments)
        assert done.exit_code == REFUSED, done.output
        return done.stderr

    async def _run(self, *arguments: str) -> Result:
        command = ["adapter", *arguments, "--url", self._url]
        return await asyncio.to_thread(CliRunner().invoke, app, command)


def made(oracle: Oracle, root: Path, seed: int) -> tuple[str, list[Change]]:
    loras = oracle.loras(modules("q_proj", "v_proj"), seed=seed)
    directory = Files(config(), keyed(loras), {"optimizer.pt": b"x" * 100}).write(root / str(seed))
    return str(directory), oracle.merge(loras, 2.0)


async def test_a_names_life(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_base("L", tmp_path / "tiny")
    oracle = Oracle(checkpoint)
    world = World("L", oracle, await stacks.start(checkpoint), stacks, tmp_path)
    adapter = Commands(stacks.stack.url)
    (first, first_changes), (second, second_changes) = (made(oracle, tmp_path, seed) for seed in (1, 2))

    checked = json.loads(await asyncio.to_thread(check, first, checkpoint))
    pushed = (await adapter("push", first, "--name", "a")).split()
    assert pushed == ["a", checked["report"]["digest"]]
    await world.serves("a", first_changes)
    assert "conflict" in await adapter.refused("push", second, "--name", "a")
    await adapter("push", second, "--name", "a", "--replace")
    await adapter("alias", "live", "a")
    for name in ("a", "live", "a@v2"):
        await world.serves(name, second_changes)
    await adapter("rollback", "a")
    for name in ("a", "live", "a@v1"):
        await world.serves(name, first_changes)
    assert "all whole" in await adapter("verify", "a")
    for verb, pinned in (("pin", True), ("unpin", False)):
        await adapter(verb, "a")
        assert json.loads(await adapter("show", "a"))["pinned"] is pinned
    shown: dict[str, Any] = json.loads(await adapter("show", "live"))
    assert (shown["name"], shown["version"], shown["alias_of"]) == ("a", 1, "a")
    assert [entry["name"] for entry in json.loads(await adapter("ls", "--json"))] == ["a"]
    await adapter("push", f"file://{second}", "--name", "b", "--narrow", "BF16")
    assert json.loads(await adapter("show", "b"))["narrowed"] == "BF16"
    for name in ("live", "a", "b"):
        await adapter("rm", name)
    assert json.loads(await adapter("ls", "--json")) == []
    assert await world.listed() == ["tiny"]


def check(directory: str, model: Path) -> str:
    done = CliRunner().invoke(app, ["adapter", "check", directory, "--model", str(model), "--json"])
    assert done.exit_code == 0, done.output
    return done.stdout
