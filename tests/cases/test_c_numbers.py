"""Class C: the same numbers again after an eviction, at every rank, scale and length, of gate and of up."""

import math

import pytest
import torch

from support.cases import (
    EFFECT_FLOOR,
    PROMPT,
    Change,
    Files,
    Loras,
    config,
    experts,
    keyed,
    modules,
    prompt_of,
    strength,
)
from support.worlds import GOOD, World, each, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")
RANKS = (1, 2, 3, 4, 5, 8, 12, 17, 32, 33, 64)


@on("L/one-slot")
async def test_c05_evicted_and_back_again(world: World) -> None:
    await evicted_and_back(world, modules("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))


@on("Q2/2x2")
async def test_c05_evicted_from_every_shard_and_back_again(world: World) -> None:
    await evicted_and_back(world, [*modules("q_proj", "k_proj", "v_proj"), *experts("gate_proj", "up_proj")])


async def evicted_and_back(world: World, packed: list[str]) -> None:
    """Where there is one slot: ten rounds of A, each after another adapter, give ten times the same."""
    targets = sorted({module.rpartition(".")[2] for module in packed})
    made = {name: world.oracle.loras(packed, seed=seed) for seed, name in enumerate(("a", "b", "c"))}
    changes = {name: world.oracle.merge(loras, 2.0) for name, loras in made.items()}
    for name, loras in made.items():
        await world.exact(Files(config(target_modules=targets), keyed(loras)), changes[name], name=name)
    answers = []
    for round_number in range(10):
        answers.append((await world.serves("a", changes["a"])).prompt_logprobs)
        await world.serves("bc"[round_number % 2], changes["bc"[round_number % 2]])
    assert all(answer == answers[0] for answer in answers)


async def of_every_rank(world: World, loras: dict[int, Loras], targets: list[str]) -> dict[str, list[Change]]:
    """Registered under `rank-N`, each seen to be right alone."""
    made = {f"rank-{rank}": world.oracle.merge(pairs, 2.0) for rank, pairs in loras.items()}

    def files(rank: int) -> Files:
        return Files(config(r=rank, lora_alpha=2 * rank, target_modules=targets), keyed(loras[rank]))

    await each(*(world.register(files(rank), name=f"rank-{rank}") for rank in loras))
    for name, changes in made.items():
        assert world.oracle.effect(changes) >= EFFECT_FLOOR
        await world.serves(name, changes)
    return made


@on("L")
async def test_c06_every_rank_alone_and_together(world: World) -> None:
    loras = {rank: world.oracle.loras(QV, rank=rank, std=strength(rank)) for rank in RANKS}
    made = await of_every_rank(world, loras, ["q_proj", "v_proj"])
    await each(*(world.serves(name, changes) for name, changes in made.items()), world.serves("tiny"))


@on("Q")
async def test_c06_every_rank_of_experts(world: World) -> None:
    leaves = ["gate_proj", "up_proj", "down_proj"]
    loras = {rank: world.oracle.loras(experts(*leaves), rank=rank, std=strength(rank)) for rank in RANKS}
    made = await of_every_rank(world, loras, leaves)
    await each(*(world.serves(name, changes) for name, changes in made.items()), world.serves("tiny"))


@on("L/one-slot")
async def test_c06_a_small_rank_in_the_slot_of_a_large_one(world: World) -> None:
    loras = {rank: world.oracle.loras(QV, rank=rank, std=strength(rank)) for rank in (64, 1)}
    made = await of_every_rank(world, loras, ["q_proj", "v_proj"])
    for _ in range(3):
        await world.serves("rank-64", made["rank-64"])
        await world.serves("rank-1", made["rank-1"])


@on("L")
async def test_c14_the_scale_is_alpha_over_rank(world: World) -> None:
    def padded(rank: int, std: float) -> Loras:
        wide = {}
        for module, (a, b) in world.oracle.loras(QV, std=std).items():
            zeros = rank - 4
            wide[module] = (
                torch.cat([a, torch.zeros(zeros, a.shape[1])]),
                torch.cat([b, torch.zeros(b.shape[0], zeros)], dim=1),
            )
        return wide

    async def at(alpha: float, rank: int) -> None:
        loras = padded(rank, 0.3 / math.sqrt(alpha / rank))
        settings = config(r=rank, lora_alpha=alpha)
        await world.exact(Files(settings, keyed(loras)), world.oracle.merge(loras, alpha / rank))

    await each(*(at(*pair) for pair in ((16, 8), (8, 8), (1, 64), (128, 4), (0.5, 4), (16.0, 8))))


async def gate_is_not_up(world: World, homes: list[str]) -> None:
    """Of layers whose gate and up are one product: shapes are equal, and hide a half that is taken for the other."""
    both = world.oracle.loras(homes, std=0.4)

    def only(leaf: str) -> Loras:
        return {m: (a, b if m.endswith(leaf) else torch.zeros_like(b)) for m, (a, b) in both.items()}

    def partner(module: str) -> str:
        home, _, leaf = module.rpartition(".")
        return f"{home}.{'up_proj' if leaf == 'gate_proj' else 'gate_proj'}"

    kinds = {
        "both": both,
        "up": only("up_proj"),
        "gate": only("gate_proj"),
        "swapped": {m: both[partner(m)] for m in both},
    }
    made = {name: world.oracle.merge(loras, 2.0) for name, loras in kinds.items()}
    differs = (world.oracle.logits(PROMPT, made["both"]) - world.oracle.logits(PROMPT, made["swapped"])).abs().max()
    assert float(differs) >= EFFECT_FLOOR
    settings = config(target_modules=["gate_proj", "up_proj"])
    await each(*(world.exact(Files(settings, keyed(kinds[name])), changes) for name, changes in made.items()))


@on("L")
async def test_c07_gate_is_not_up(world: World) -> None:
    await gate_is_not_up(world, modules("gate_proj", "up_proj"))


@on("Q")
async def test_c07_an_experts_gate_is_not_its_up(world: World) -> None:
    await gate_is_not_up(world, experts("gate_proj", "up_proj"))


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 400, 512, 1024)


@pytest.mark.timeout(240)
@on("L-long/hybrid")
async def test_c10_prompts_of_every_length(world: World) -> None:
    """Of ranks that are computed in the engine and of ranks that are not, where memory holds two of the longest."""
    made = {f"c10-{rank}": await world.made(f"c10-{rank}", rank, rank=rank, std=strength(rank)) for rank in (8, 64)}
    for length in LENGTHS:
        prompt = prompt_of(length)
        assert length < 3 or all(world.oracle.effect(changes, prompt) >= EFFECT_FLOOR for changes in made.values())
        await each(*(world.serves(name, changes, prompt=prompt, max_tokens=4) for name, changes in made.items()))


async def zero_is_the_base(world: World, homes: list[str]) -> None:
    targets = sorted({module.rpartition(".")[2] for module in homes})
    loras = world.oracle.loras(homes)
    fresh = {module: (a, torch.zeros_like(b)) for module, (a, b) in loras.items()}
    await world.register(Files(config(target_modules=targets), keyed(fresh)), name="c12-fresh")
    await world.register(Files(config(target_modules=targets, lora_alpha=0), keyed(loras)), name="c12-alpha")
    base = await world.serves("tiny")
    for name in ("c12-fresh", "c12-alpha"):
        scored = await world.serves(name)
        assert (scored.prompt_logprobs, scored.token_ids) == (base.prompt_logprobs, base.token_ids)
        assert scored.headers["x-adapter-digest"].startswith("sha256:")
    await each(*(world.serves(name) for name in ("c12-fresh", "c12-alpha", "tiny")), world.serves(GOOD, world.good))


@on("L")
async def test_c12_an_adapter_of_zeros_is_the_base(world: World) -> None:
    await zero_is_the_base(world, modules("q_proj", "v_proj", "down_proj"))


@on("Q")
async def test_c12_experts_of_zeros_are_the_bases(world: World) -> None:
    await zero_is_the_base(world, experts("gate_proj", "up_proj", "down_proj"))
