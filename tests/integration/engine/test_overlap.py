"""Steps whole and in halves that take turns, over every back-end: the numbers of the oracle, and of one another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from infinilora.engine.lora.hybrid import HybridLora
from infinilora.engine.lora.interface import LoraBackend
from infinilora.engine.lora.local import LocalLora
from infinilora.engine.sched.scheduler import Limits
from infinilora.pool.pool import AdapterPool
from infinilora.protocol.ids import Digest
from infinilora.runtime.service import Service
from support.engines import Heard, TestEngine
from support.every_site import Case, is_idle, is_resident, living
from support.lora_inside import remote
from support.oracle import ATTENTION, MLP
from support.tiny_models import VOCAB
from support.tiny_world import LOGPROB, TinyWorld
from support.waiting import eventually

pytestmark = pytest.mark.integration

Backend = Literal["shm", "tcp", "local", "hybrid"]
TOKENS = 6


class House(TinyWorld):
    """A base and three adapters, one of them with column scales."""

    def __init__(self, work: Path, name: str) -> None:
        super().__init__(work, name)
        self.add((*ATTENTION, *MLP), rank=4)
        self.add(MLP, rank=3, dora=name == "llama")
        self.add((*ATTENTION, "lm_head", "embed_tokens"), rank=8)
        self.case = Case(self.model.card, self.blobs, [], work)

    @property
    def asked(self) -> list[tuple[list[int], Digest | None]]:
        """Prompts of unlike lengths: with adapters, two of the same one, and of the base."""
        first, second, third = self.sources
        digests = [first, second, None, third, None, first]
        lengths = (4, 19, 9, 1, 6, 13)
        return [
            ([(7 * i + 3 * n) % (VOCAB - 3) + 3 for i in range(length)], digest)
            for n, (length, digest) in enumerate(zip(lengths, digests, strict=True))
        ]


@pytest.fixture(scope="module", params=["llama", "qwen2_moe"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp(request.param), request.param)


@asynccontextmanager
async def coupled(house: House) -> AsyncIterator[tuple[LocalLora, AdapterPool]]:
    pool = house.case.pool("local")
    lora = LocalLora(pool, lambda: None)
    yield lora, pool
    lora.close()
    await eventually(partial(is_idle, pool), "the pool is idle")
    pool.close()


@asynccontextmanager
async def opened(backend: Backend, house: House, service: Service) -> AsyncIterator[LoraBackend]:
    """The back-end; of `hybrid`, the first adapter is computed here and the others are not."""
    if backend == "local":
        async with coupled(house) as (lora, _):
            yield lora
    elif backend == "hybrid":
        async with remote(house.case, service, "shm") as far, coupled(house) as (near, pool):
            hot = next(iter(house.sources))
            both = HybridLora(far, near, pool)
            for _ in range(2):
                both.want(hot)
            await eventually(partial(is_resident, near, hot), "the hot adapter is here")
            yield both
            assert [digest for digest in house.sources if is_resident(near, digest)] == [hot]
            for _ in range(2):
                both.drop(hot)
            both.check()
    else:
        async with remote(house.case, service, backend) as lora:
            yield lora


def told(house: House, lora: LoraBackend, *, halves: bool) -> list[Heard]:
    """What each of `asked` hears, all of them at once."""
    engine = TestEngine(house.model, lora, limits=Limits(max_running=8, step_tokens=16), halves=halves)
    heard = [
        engine.ask(prompt, digest=digest, max_tokens=TOKENS, logprobs=0, prompt_logprobs=0)
        for prompt, digest in house.asked
    ]
    engine.finish(heard)
    engine.loop._scheduler.check_idle()
    return heard


@pytest.mark.parametrize("backend", ["shm", "tcp", "local", "hybrid"])
async def test_steps_in_halves_give_the_numbers_of_whole_ones_and_of_the_oracle(house: House, backend: Backend) -> None:
    async with living() as service, opened(backend, house, service) as lora:
        whole = await asyncio.to_thread(told, house, lora, halves=False)
        half = await asyncio.to_thread(told, house, lora, halves=True)
    for (prompt, digest), one, other in zip(house.asked, whole, half, strict=True):
        assert len(one.tokens) == TOKENS
        assert one.tokens == other.tokens
        house.is_right(one, prompt, digest)
        house.is_right(other, prompt, digest)
        if digest is not None:
            base = house.oracle.logprobs(prompt + one.tokens)
            seen = [score.logprob for score in (*one.prompt_scores, *one.scores)]
            assert max(abs(a - b) for a, b in zip(seen, base, strict=True)) > 10 * LOGPROB, "the base would be seen"
