"""A shard that dies or stops at any site of any step: its group is over, and nobody's tokens are wrong.

Two groups of real processes hold the same adapters. Rows of the lost group are run again whole on the other one; the
others never hear of it.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import Tensor

from infinilora.engine.lora.interface import StepLost, StepPlan, Ticket
from infinilora.engine.lora.remote import RemoteLora
from infinilora.engine.sched.scheduler import Limits
from infinilora.protocol.ids import Digest
from infinilora.protocol.shards import Shape
from support.engines import TestEngine
from support.every_site import living
from support.lora_groups import LoraGroup, engine_of
from support.lora_servers import LoraServerProcess
from support.oracle import ATTENTION, MLP
from support.procs import NatsServer, ValkeyServer
from support.tiny_models import VOCAB
from support.tiny_world import TinyWorld
from support.waiting import eventually

pytestmark = pytest.mark.integration

LAST_CALL = 120
"""Beyond it a round of the test might have no site call left."""
End = Literal["kill", "stop"]


class Disturbed:
    """A back-end that lets something happen just before one of its site calls. Whose rows were lost, it notes."""

    def __init__(self, lora: RemoteLora, at: int, act: Callable[[], object]) -> None:
        self._lora = lora
        self._left = at
        self._act = act
        self.lost: set[Digest] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lora, name)

    def submit(self, plan: StepPlan, *call: Any) -> Ticket | None:
        self._left -= 1
        if self._left == 0:
            self._act()
        return self._lora.submit(plan, *call)

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        try:
            self._lora.add(ticket, y)
        except StepLost as lost:
            self.lost |= lost.digests
            raise

    @property
    def has_happened(self) -> bool:
        return self._left <= 0


class World(TinyWorld):
    """A tiny mixture of experts, three adapters, and two groups of unlike shape that both serve it."""

    def __init__(self, work: Path, nats: NatsServer, redis: ValkeyServer) -> None:
        super().__init__(work, "qwen3_moe")
        for number, targets in enumerate((ATTENTION + MLP, MLP, ATTENTION)):
            self.add(targets, rank=3 + number)
        self.first, self.second = (
            LoraGroup(work, self.model.card, shape, nats, redis, LINK_BUFFERS=8) for shape in (Shape(2, 1), Shape(1, 2))
        )

    @property
    def placed(self) -> Mapping[Digest, tuple[str, ...]]:
        *most, last = self.sources
        return dict.fromkeys(most, (self.first.name,)) | {last: (self.second.name,)}


@pytest.fixture
def world(tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer) -> Iterator[World]:
    world = World(tmp_path, nats_server, redis_server)
    world.first.start()
    world.second.start()
    yield world
    world.first.close()
    world.second.close()


def have_ended(shards: Sequence[LoraServerProcess]) -> bool:
    return all(shard._process is None or shard._process.poll() is not None for shard in shards)


async def one_round(world: World, lora: RemoteLora, dice: random.Random, how: End, *, halves: bool) -> None:
    shard = dice.choice(world.first.shards)
    disturbed = Disturbed(lora, dice.randrange(1, LAST_CALL), shard.kill if how == "kill" else shard.freeze)
    engine = TestEngine(world.model, disturbed, limits=Limits(max_running=8, step_tokens=24), halves=halves)
    digests = [*world.sources, *world.sources, None]
    prompts = [[dice.randrange(3, VOCAB) for _ in range(dice.randrange(4, 20))] for _ in digests]
    heard = [
        engine.ask(p, digest=d, max_tokens=12, logprobs=0, prompt_logprobs=0)
        for p, d in zip(prompts, digests, strict=True)
    ]

    await asyncio.to_thread(engine.finish, heard)

    assert disturbed.has_happened
    *of_the_first, of_the_second = world.sources
    assert disturbed.lost <= set(of_the_first), "rows of the other group were never lost"
    assert of_the_second not in disturbed.lost
    for one, prompt, digest in zip(heard, prompts, digests, strict=True):
        world.is_right(one, prompt, digest)
    engine.loop.check_idle()
    others = [one for one in world.first.shards if one is not shard]
    await eventually(lambda: have_ended(others), "the other shards end", timeout_s=30)
    if how == "stop":
        shard.thaw()
        await eventually(lambda: have_ended([shard]), "the stopped one finds itself alone, and ends", timeout_s=30)


ROUNDS = [
    pytest.param(1, marks=pytest.mark.timeout(240)),
    pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_tokens_agree_whenever_a_shard_is_lost(world: World, rounds: int, how: End) -> None:
    dice = random.Random(f"{how} {rounds}")
    async with living() as service, engine_of((world.first, world.second), service) as lora:
        lora.place(world.placed)
        both = {world.first.name, world.second.name}
        for number in range(rounds):
            if number:
                world.first.close()
                world.first.start()
            await eventually(lambda: set(lora.open_links) == both, "both links are open", timeout_s=90)
            halves = (number % 2 == 0) == (how == "kill")  # one round of each has both
            await one_round(world, lora, dice, how, halves=halves)
