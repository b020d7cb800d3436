"""Class C: rows of several adapters and of the base in one batch, in chunks, put back, and on a shared prefix."""

import asyncio
import re
from collections.abc import Sequence

import httpx
import pytest

from support.api import Scored, stream_ids
from support.cases import EFFECT_FLOOR, PROMPT, Change, prompt_of, strength
from support.worlds import NUM_TOKENS, World, each, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]

KINDS = {
    "a": (4, ("q_proj", "v_proj")),
    "b": (9, ("o_proj", "k_proj")),
    "c": (16, ("k_proj", "q_proj", "o_proj")),
    "d": (1, ("v_proj", "o_proj")),
}
"""Rank and targets of each adapter."""
MARGIN = 0.05
"""Between the two best logits: where it is larger, no noise chooses another token."""
SPREAD = 1e-4
"""Of a logprob in fp32, alone and in a crowd."""


async def several(world: World, case: str, names: str = "abcd") -> dict[str, list[Change]]:
    """Registered, and each seen to have an effect; with the base, which changes nothing."""
    made: dict[str, list[Change]] = {"tiny": []}
    for seed, name in enumerate(names):
        rank, leaves = KINDS[name]
        made[f"{case}-{name}"] = await world.made(
            f"{case}-{name}", seed, rank=rank, std=1.5 * strength(rank), leaves=leaves
        )
        assert world.oracle.effect(made[f"{case}-{name}"]) >= EFFECT_FLOOR
    return made


@on("L")
async def test_c01_base_and_adapters_in_one_batch(world: World) -> None:
    made = await several(world, "c01", "abc")
    base, a, b, c = made
    for batch in ([base, a], [a, base], [base, a, a, b, base, b], [a, b, a, b], [base] * 4, [c, base, a, c, b]):
        for length in (1, 7, 64):
            prompts = [prompt_of(length, seed) for seed in range(len(batch))]
            await each(*(world.serves(m, made[m], prompt=p) for m, p in zip(batch, prompts, strict=True)))


@on("L")
async def test_c01_prompts_that_come_while_others_decode(world: World) -> None:
    made = await several(world, "c01m", "abc")
    base, a, b, c = made

    async def decode(model: str, begun: asyncio.Event) -> None:
        tokens: list[int] = []
        async for event in world.api.stream(model, PROMPT, max_tokens=100):
            tokens += stream_ids([event])
            begun.set()
        assert len(tokens) == 100
        world.assert_right(model, PROMPT, tokens, made[model])

    begun = [asyncio.Event() for _ in range(3)]
    async with asyncio.TaskGroup() as tasks:
        for model, event in zip((base, a, b), begun, strict=True):
            tasks.create_task(decode(model, event))
        await asyncio.gather(*(event.wait() for event in begun))
        for seed, model in enumerate((c, base, a, b, c)):
            tasks.create_task(world.serves(model, made[model], prompt=prompt_of(64, seed)))


def same_tokens(world: World, changes: Sequence[Change], alone: Scored, other: Scored) -> bool:
    """As far as they are the best by a margin; after one that is not, they may part."""
    logits = world.oracle.logits(PROMPT + alone.token_ids, changes)[len(PROMPT) - 1 : -1]
    best = logits.topk(2, -1).values
    for margin, one, two in zip((best[:, 0] - best[:, 1]).tolist(), alone.token_ids, other.token_ids, strict=True):
        if one != two:
            return bool(margin <= MARGIN)
    return True


SOAK_C11 = pytest.param(10, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


async def alone_and_in_a_crowd(world: World, repeats: int) -> None:
    case = f"c11-{repeats}"
    made = await several(world, case)
    alone = {model: await world.serves(model, changes) for model, changes in made.items()}
    for model, changes in made.items():
        again = await world.serves(model, changes)
        assert (again.prompt_logprobs, again.token_ids) == (alone[model].prompt_logprobs, alone[model].token_ids)
    crowd = (list(made) * 7)[:32]
    for _ in range(repeats):
        told = await asyncio.gather(*(world.api.score(model, PROMPT, max_tokens=NUM_TOKENS) for model in crowd))
        for model, scored in zip(crowd, told, strict=True):
            pairs = zip(scored.prompt_logprobs, alone[model].prompt_logprobs, strict=True)
            assert max(abs(one - two) for one, two in pairs) <= SPREAD
            assert scored.token_ids == alone[model].token_ids or same_tokens(
                world, made[model], alone[model], scored
            ), model


@pytest.mark.parametrize("repeats", [2, SOAK_C11])
@on("L")
async def test_c11_alone_and_in_a_crowd(world: World, repeats: int) -> None:
    await alone_and_in_a_crowd(world, repeats)


@pytest.mark.parametrize("repeats", [2, SOAK_C11])
@on("Q")
async def test_c11_alone_and_in_a_crowd_of_experts(world: World, repeats: int) -> None:
    await alone_and_in_a_crowd(world, repeats)


async def num_preempted(url: str) -> int:
    async with httpx.AsyncClient() as http:
        text = (await http.get(url)).text
    found = re.search(r"^infinilora_engine_preemptions_total (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


@on("L/tight")
async def test_c13_chunks_and_preemption_with_several_adapters(world: World) -> None:
    """Chunks of 16, two slots, and keys and values of three sequences: eight of four adapters and the base."""
    made = await several(world, "c13")
    metrics = f"http://{world.setting('METRICS_LISTEN')}/metrics"
    before = await num_preempted(metrics)
    models = (list(made) * 2)[:8]
    prompts = [prompt_of(100, seed) for seed in range(len(models))]
    for _ in range(3):
        await each(*(world.serves(m, made[m], prompt=p, max_tokens=60) for m, p in zip(models, prompts, strict=True)))
    assert await num_preempted(metrics) > before


SOAK_C17 = pytest.param(10, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("runs", [3, SOAK_C17])
@pytest.mark.parametrize("leave", [False, True])
@on("L-long/hybrid")
async def test_c17_adapters_take_turns_on_a_shared_prefix(world: World, *, leave: bool, runs: int) -> None:
    """Two long answers, while short ones of two adapters come and go, or leave at their first token."""
    made = await several(world, f"c17-{leave:d}-{runs}", "ab")
    base, *turns = made

    async def ask(model: str, prompt: list[int], num_tokens: int, *, leave_after: int | None = None) -> None:
        tokens: list[int] = []
        async for event in world.api.stream(model, prompt, max_tokens=num_tokens):
            tokens += stream_ids([event])
            if leave_after is not None and len(tokens) >= leave_after:
                break
        assert len(tokens) == num_tokens or leave_after is not None
        world.assert_right(model, prompt, tokens, made[model])

    for run in range(runs):
        shared = prompt_of(600, run)
        async with asyncio.TaskGroup() as tasks:
            for number, model in enumerate((base, turns[run % 2])):
                tasks.create_task(ask(model, [*shared, number], 48))
            for number in range(4):
                tail, leave_after = prompt_of(1 + number, run), 1 if leave and number % 2 else None
                await each(*(ask(model, shared + tail, 4, leave_after=leave_after) for model in turns))
