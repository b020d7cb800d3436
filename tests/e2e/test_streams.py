"""Many streams at once, some of whose clients leave: no wrong token, and nothing left behind."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from support.api import Api, stream_ids
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STREAMS = 64


async def consume(api: Api, model: str, prompt: list[int], *, leave_after: int | None) -> list[int]:
    events: list[dict[str, Any]] = []
    async for event in api.stream(model, prompt, max_tokens=40):
        assert "error" not in event, event
        events.append(event)
        if leave_after is not None and len(stream_ids(events)) >= leave_after:
            break
    return stream_ids(events)


def is_idle(fleet: dict[str, Any]) -> bool:
    engines = [m["load"] for m in fleet["members"] if m["kind"] == "engine"]
    groups = [m["load"] for m in fleet["members"] if m["kind"] == "lora-server"]
    return (
        bool(engines and groups)
        and all(e["running"] == e["waiting"] == 0 and e["kv_blocks_free"] == e["kv_blocks_total"] for e in engines)
        and all(g["leases"] == 0 for g in groups)
    )


async def test_streams_of_three_adapters_and_base_with_clients_that_leave(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    oracle = Oracle(checkpoint)
    adapters: dict[str, Path | None] = {
        f"a{rank}": write_adapter(
            tmp_path / f"a{rank}", checkpoint, rank=rank, targets=ATTENTION + MLP, seed=rank, std=0.2
        )
        for rank in (4, 8, 16)
    }
    api = await stacks.start(checkpoint)
    pids = stacks.stack.pids()
    for name, path in adapters.items():
        assert path is not None
        await api.register(name, path)
    models = {**adapters, "tiny": None}
    dice = random.Random(11)
    wanted = [
        (
            dice.choice(sorted(models)),
            [dice.randrange(128) for _ in range(dice.randrange(3, 60))],
            dice.choice((None, None, 1, 7)),
        )
        for _ in range(STREAMS)
    ]
    produced = await asyncio.gather(*(consume(api, m, p, leave_after=leave) for m, p, leave in wanted))

    for (model, prompt, leave), tokens in zip(wanted, produced, strict=True):
        assert len(tokens) == 40 if leave is None else len(tokens) >= leave
        assert oracle.shortfall(prompt, tokens, models[model]) <= 2e-3
    await stacks.fleet(is_idle, within_s=20)
    assert stacks.stack.pids() == pids
