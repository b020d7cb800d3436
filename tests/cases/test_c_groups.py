"""Class C: the same numbers from a LoRA server that is several processes, by experts and by layers."""

import pytest

from support.cases import EFFECT_FLOOR, Files, config, experts, keyed, modules
from support.worlds import World, each, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]

GATED = ["gate_proj", "up_proj", "down_proj"]
TOUCHED = {"first": (0, 1, 2, 3), "second": (4, 5, 6, 7), "across": (3, 4), "all": tuple(range(8))}
"""Experts that each adapter moves; a group of two columns has four in each."""


@on("Q8/2x2")
async def test_c08_experts_of_either_column_and_of_both(world: World) -> None:
    made = {}
    for seed, (name, numbers) in enumerate(TOUCHED.items()):
        loras = world.oracle.loras(experts(*GATED, numbers=numbers), seed=seed, std=0.3)
        made[name] = world.oracle.merge(loras, 2.0)
        await world.register(Files(config(target_modules=GATED), keyed(loras)), name=name)
        assert world.oracle.effect(made[name]) >= EFFECT_FLOOR
        await world.serves(name, made[name])
    together = [world.serves(name, changes) for name, changes in made.items()]
    await each(*together, world.serves("tiny"), world.serves("across", made["across"]))


@on("Q2/2x2")
async def test_c18_what_is_summed_over_columns_is_counted_once(world: World) -> None:
    homes = [f"model.layers.{layer}.mlp.shared_expert.down_proj" for layer in (0, 1)]
    loras = world.oracle.loras([*modules("o_proj"), *homes, *experts("down_proj")], std=0.3)
    settings = config(target_modules=["o_proj", "down_proj"])
    await world.exact(Files(settings, keyed(loras)), world.oracle.merge(loras, 2.0))
