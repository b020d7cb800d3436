"""Law 9, through HTTP and all four processes: what is served equals transformers (+ PEFT, or an explicit merge)."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.api import Api
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.stacks import StackFactory
from support.tiny_models import DENSE, MOE, make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LOGPROB_BOUND = 1e-3
TEACHER_FORCED_BOUND = 2e-3
EFFECT_FLOOR = 0.3

ADAPTERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "r4-attention": (4, ("q_proj", "v_proj")),
    "r8-output": (8, ("o_proj", "k_proj")),
    "r16-all": (16, (*ATTENTION, *MLP, "w1", "w2", "w3")),
    "r64-mlp": (64, (*MLP, "w1", "w2", "w3")),
    "r6-outer": (6, ("lm_head", "embed_tokens", "shared_expert_gate")),
    "r5-dora": (5, ("q_proj", "k_proj", "o_proj", "lm_head", "shared_expert_gate")),
}


@dataclass(frozen=True)
class Case:
    model: str
    prompt: list[int]
    adapter: Path | None


def make_adapters(root: Path, checkpoint: Path, oracle: Oracle, prompt: list[int]) -> dict[str, Path]:
    """Adapters of several ranks and targets, each strong enough to be seen."""
    made = {}
    for seed, (name, (rank, targets)) in enumerate(ADAPTERS.items()):
        path = root / name
        for std in (0.1, 0.15, 0.25, 0.4):
            write_adapter(path, checkpoint, rank=rank, targets=targets, seed=seed, std=std, dora="dora" in name)
            if oracle.effect(prompt, path) >= EFFECT_FLOOR:
                break
        assert oracle.effect(prompt, path) >= EFFECT_FLOOR
        made[name] = path
    return made


async def check(api: Api, oracle: Oracle, case: Case, *, max_tokens: int = 8) -> None:
    scored = await api.score(case.model, case.prompt, max_tokens=max_tokens)
    wanted = oracle.logprobs(case.prompt, case.adapter)
    assert len(scored.prompt_logprobs) == len(wanted)
    worst = max(abs(a - b) for a, b in zip(scored.prompt_logprobs, wanted, strict=True))
    assert worst <= LOGPROB_BOUND, f"{case.model}: logprobs differ by {worst}"
    assert len(scored.token_ids) == max_tokens
    shortfall = oracle.shortfall(case.prompt, scored.token_ids, case.adapter)
    assert shortfall <= TEACHER_FORCED_BOUND, f"{case.model}: a served token falls {shortfall} short"
    if case.adapter is not None:
        assert scored.headers["x-adapter-digest"].startswith("sha256:")


def cases(adapters: dict[str, Path]) -> list[Case]:
    """Base and every adapter, with short, middling and long prompts."""
    dice = random.Random(7)
    named: list[tuple[str, Path | None]] = [("tiny", None), *adapters.items()]
    return [
        Case(model, [dice.randrange(128) for _ in range(length)], path)
        for length in (3, 17, 90)
        for model, path in named
    ]


async def serve_and_check(factory: StackFactory, family: str, root: Path, *, backend: str = "shm") -> None:
    checkpoint = make_tiny_model(family, root / "tiny").directory
    oracle = Oracle(checkpoint)
    probe = [random.Random(3).randrange(128) for _ in range(24)]
    adapters = make_adapters(root / "adapters", checkpoint, oracle, probe)
    api = await factory.start(checkpoint, backend=backend)
    for name, path in adapters.items():
        await api.register(name, path)
    everything = cases(adapters)
    for case in everything[: len(adapters) + 1]:
        await check(api, oracle, case)
    async with asyncio.TaskGroup() as together:
        for case in everything:
            together.create_task(check(api, oracle, case))


@pytest.mark.parametrize("family", DENSE + MOE)
async def test_every_family_serves_what_transformers_computes(
    family: str, stacks: StackFactory, tmp_path: Path
) -> None:
    await serve_and_check(stacks, family, tmp_path)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("backend", ["tcp", "local"])
async def test_every_back_end_serves_the_same(family: str, backend: str, stacks: StackFactory, tmp_path: Path) -> None:
    await serve_and_check(stacks, family, tmp_path, backend=backend)
