"""Everything at once on groups of real processes: more adapters than slots, too few blocks, aborts, steps in halves.

Each token that any client was told is checked against the oracle under that client's own adapter.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infinilora.engine.lora.interface import AdapterRows, StepPlan
from infinilora.engine.lora.remote import RemoteLora
from infinilora.engine.sched.scheduler import Limits
from infinilora.protocol.ids import Digest
from infinilora.protocol.shards import Shape
from support.engines import Heard, TestEngine
from support.every_site import living
from support.lora_groups import LoraGroup, engine_of
from support.oracle import ATTENTION, MLP
from support.procs import NatsServer, ValkeyServer
from support.tiny_models import VOCAB
from support.tiny_world import TinyWorld

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

IN_THE_SUITE = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 4)]
WAYS = list(itertools.product(("shm", "tcp"), (False, True)))
"""Link, and whether steps go in halves: a part of the clients of each."""
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]
ROUNDS = [
    *(pytest.param(Shape(*pair), 10, id="{}x{}".format(*pair)) for pair in IN_THE_SUITE),
    *(
        pytest.param(Shape(*pair), 56, marks=SOAK, id="{}x{} long".format(*pair))
        for pair in itertools.product((1, 2, 4), repeat=2)
    ),
]
"""Shapes, and clients of each way: 200 in the suite, 2,016 in the soak."""
SLOTS = 3
KV_BYTES = 36 * 1024
"""72 tokens of 4 layers: too few for those that run."""
ADAPTERS = [
    ((*ATTENTION, *MLP), 4, False),
    (MLP, 3, False),
    (ATTENTION, 8, False),
    (("q_proj", "lm_head", "embed_tokens"), 5, False),
    (ATTENTION, 6, True),
    (("gate", "shared_expert_gate", "down_proj"), 2, False),
]
"""Targets, rank, whether it has column scales."""


@dataclass
class Client:
    prompt: list[int]
    digest: Digest | None
    heard: Heard
    aborted: bool = False


class Watched:
    """A back-end of which it is noted under which tenancies rows were computed."""

    def __init__(self, lora: RemoteLora, tenancies: set[tuple[Digest, int, int]]) -> None:
        self._lora = lora
        self._tenancies = tenancies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lora, name)

    def begin(self, rows: Sequence[AdapterRows], trace: bytes = b"") -> StepPlan | None:
        self._tenancies |= {(row.lease.digest, row.lease.slot, row.lease.slot_generation) for row in rows}
        return self._lora.begin(rows, trace)


def soak(dice: random.Random, engine: TestEngine, digests: Sequence[Digest], count: int) -> list[Client]:
    """Clients that come at random, some of whom leave early, until the last one is done."""
    stem = [dice.randrange(3, VOCAB) for _ in range(24)]
    clients: list[Client] = []
    while len(clients) < count or engine.loop._jobs:
        if len(clients) < count and dice.random() < 0.4:
            clients.append(ask(dice, engine, dice.choice([None, *digests]), stem))
        if clients and dice.random() < 0.02:
            client = dice.choice(clients)
            assert client.heard.job is not None
            client.aborted |= not client.heard.is_over
            engine.loop.abort(client.heard.job)
        engine.turn_or_yield()
    engine.loop.check_idle()
    return clients


def ask(dice: random.Random, engine: TestEngine, digest: Digest | None, stem: list[int]) -> Client:
    prompt = stem[: dice.randrange(24)] + [dice.randrange(3, VOCAB) for _ in range(dice.randrange(1, 10))]
    scored: dict[str, Any] = {"logprobs": 0, "prompt_logprobs": 0} if dice.random() < 0.3 else {}
    return Client(prompt, digest, engine.ask(prompt, digest=digest, max_tokens=dice.randrange(2, 20), **scored))


@pytest.mark.parametrize(("shape", "count"), ROUNDS)
async def test_every_token_is_of_the_clients_own_adapter(
    shape: Shape, count: int, tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer
) -> None:
    world = TinyWorld(tmp_path, "qwen2_moe-deep", kv_bytes=KV_BYTES, max_model_len=64)
    digests = [world.add(targets, rank=rank, dora=dora) for targets, rank, dora in ADAPTERS]
    dice = random.Random(f"{shape} {count}")
    tenancies: set[tuple[Digest, int, int]] = set()
    clients: list[Client] = []
    group = LoraGroup(tmp_path, world.model.card, shape, nats_server, redis_server, NUM_SLOTS=SLOTS)
    group.start()
    try:
        async with living() as service:
            for backend, halves in WAYS:
                async with engine_of((group,), service, backend=backend) as lora:
                    limits = Limits(max_running=6, step_tokens=11, max_bypass=8)
                    engine = TestEngine(world.model, Watched(lora, tenancies), limits=limits, halves=halves)
                    clients += await asyncio.to_thread(soak, dice, engine, digests, count)
    finally:
        group.close()

    for client in clients:
        if client.heard.tokens:
            world.is_right(client.heard, client.prompt, client.digest)
        assert client.aborted or client.heard.ended.reason == "length"
    assert len(tenancies) > len(digests), "no adapter was evicted and staged again"
    assert any(c.heard.ended.num_preemptions for c in clients), "no sequence was put back"
