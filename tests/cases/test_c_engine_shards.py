"""Class C: the same numbers from an engine that is two processes, tensors and experts cut between them."""

import pytest
import torch

from support.cases import EFFECT_FLOOR, Change, Files, config, experts, keyed, modules
from support.worlds import World, each, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]

GATED = ["gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOUCHED = {"first": (0, 1, 2, 3), "second": (4, 5, 6, 7), "across": (3, 4), "all": tuple(range(8))}
"""Experts that each adapter moves; each shard of two has four."""


@on("Q8/in-2")
async def test_c08_experts_of_either_shard_and_of_both(world: World) -> None:
    made = {}
    for seed, (name, numbers) in enumerate(TOUCHED.items()):
        loras = world.oracle.loras(experts(*GATED, numbers=numbers), seed=seed, std=0.3)
        made[name] = world.oracle.merge(loras, 2.0)
        await world.register(Files(config(target_modules=GATED), keyed(loras)), name=name)
        assert world.oracle.effect(made[name]) >= EFFECT_FLOOR
        await world.serves(name, made[name])
    together = [world.serves(name, changes) for name, changes in made.items()]
    await each(*together, world.serves("tiny"), world.serves("across", made["across"]))


async def every_target_alone_and_together(world: World, targets: list[str]) -> None:
    """Rank 3, which divides by nothing."""
    made = {}
    for seed, name in enumerate([*targets, "every"]):
        leaves = targets if name == "every" else [name]
        loras = world.oracle.loras(modules(*leaves), rank=3, seed=seed, std=0.4)
        made[name] = world.oracle.merge(loras, 2.0)
        assert world.oracle.effect(made[name]) >= EFFECT_FLOOR, name
        settings = config(r=3, lora_alpha=6, target_modules=leaves)
        await world.register(Files(settings, keyed(loras)), name=name)
    await each(world.serves("tiny"), *(world.serves(name, changes) for name, changes in made.items()))


@on("L/in-2")
async def test_c09_columns_and_rows_of_every_target_are_cut(world: World) -> None:
    await every_target_alone_and_together(world, [*ATTENTION, *GATED])


@on("L-kv1/in-2")
async def test_c09_a_kv_head_that_both_shards_have_is_copied(world: World) -> None:
    await every_target_alone_and_together(world, ATTENTION)


@on("Q8/in-2")
async def test_c09_attention_beside_experts_is_cut(world: World) -> None:
    await every_target_alone_and_together(world, ATTENTION)


@on("Q2/in-2")
async def test_c18_what_shards_sum_is_counted_once(world: World) -> None:
    homes = [f"model.layers.{layer}.mlp.shared_expert.down_proj" for layer in (0, 1)]
    loras = world.oracle.loras([*modules("o_proj"), *homes, *experts("down_proj")], std=0.3)
    settings = config(target_modules=["o_proj", "down_proj"])
    await world.exact(Files(settings, keyed(loras)), world.oracle.merge(loras, 2.0))


@on("Q2-odd/in-3")
async def test_c18_experts_and_columns_that_do_not_divide_by_the_shards(world: World) -> None:
    """Five experts and a shared one of 41 columns, on three shards with two heads each."""
    shared = [f"model.layers.{layer}.mlp.shared_expert.{leaf}" for layer in (0, 1) for leaf in GATED]
    homes = [*modules(*ATTENTION), *shared, *experts(*GATED, numbers=range(5))]
    loras = world.oracle.loras(homes, rank=3, std=0.3)
    settings = config(r=3, lora_alpha=6, target_modules=[*ATTENTION, *GATED])
    await world.exact(Files(settings, keyed(loras)), world.oracle.merge(loras, 2.0))


@on("L/in-2")
async def test_c18_the_bias_of_a_partial_delta_is_added_once(world: World) -> None:
    loras = world.oracle.loras(modules("o_proj", "down_proj"), rank=3, std=0.3)
    dice = torch.Generator().manual_seed(18)
    biases = {module: 0.3 * torch.randn(len(b), generator=dice) for module, (_, b) in loras.items()}
    tensors = keyed(loras) | {f"base_model.model.{module}.lora_B.bias": bias for module, bias in biases.items()}
    changes = [Change(f"{module}.bias", 2.0 * bias) for module, bias in biases.items()]
    settings = config(r=3, lora_alpha=6, target_modules=["o_proj", "down_proj"], lora_bias=True)
    await world.exact(Files(settings, tensors), [*world.oracle.merge(loras, 2.0), *changes])
