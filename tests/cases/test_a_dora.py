"""Class A, DoRA: served with the numbers of the explicit merge, or refused by name where half of it is missing."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from support.cases import ATTENTION, Change, Files, Loras, Oracle, config, experts, keyed, modules
from support.worlds import World, each, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

VECTOR = "base_model.model.{}.lora_magnitude_vector"
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
Magnitudes = dict[str, Tensor]


def magnitudes(oracle: Oracle, loras: Loras) -> Magnitudes:
    """Lengths that no row of the base has."""
    dice = torch.Generator().manual_seed(3)
    return {module: 0.5 + 2 * torch.rand(oracle.shape(module)[0], generator=dice) for module in loras}


def files(oracle: Oracle, loras: Loras, m: Mapping[str, Tensor], **settings: object) -> Files:
    targets = sorted({module.rpartition(".")[2] for module in loras})
    vectors = {VECTOR.format(module): vector for module, vector in m.items()}
    return Files(config(target_modules=targets, use_dora=True, **settings), keyed(loras) | vectors)


def merged(oracle: Oracle, loras: Loras, scale: float, m: Magnitudes) -> list[Change]:
    """Each row of W + scale B A, brought to its length; no bias is touched."""
    changes = []
    for module, (a, b) in loras.items():
        weight = oracle.model.get_submodule(module).weight.detach().double()
        adapted = weight + scale * (b.double() @ a.double())
        lengths = m[module].double() / adapted.norm(dim=1)
        changes.append(Change(f"{module}.weight", (lengths[:, None] * adapted - weight).float()))
    return changes


@on("L")
async def test_a04_dora(world: World) -> None:
    loras = world.oracle.loras(modules(*EVERY))
    m = magnitudes(world.oracle, loras)
    some = world.oracle.loras(modules("k_proj", "up_proj"), rank=3)
    other = magnitudes(world.oracle, some)
    zero = {module: torch.zeros_like(vector) for module, vector in other.items()}
    head = world.oracle.loras(["lm_head"])
    lengths = magnitudes(world.oracle, head)
    root = 8 / 3**0.5
    await each(
        world.exact(files(world.oracle, loras, m), merged(world.oracle, loras, 2.0, m)),
        world.exact(files(world.oracle, some, zero, r=3), merged(world.oracle, some, 8 / 3, zero)),
        world.exact(files(world.oracle, some, other, r=3, use_rslora=True), merged(world.oracle, some, root, other)),
        world.exact(files(world.oracle, head, lengths), merged(world.oracle, head, 2.0, lengths)),
    )


@on("L-bias")
async def test_a04_dora_leaves_the_bases_biases_alone(world: World) -> None:
    loras = world.oracle.loras(modules(*ATTENTION))
    m = magnitudes(world.oracle, loras)
    await world.exact(files(world.oracle, loras, m), merged(world.oracle, loras, 2.0, m))


@on("L")
async def test_a04_half_of_dora(world: World) -> None:
    loras = world.oracle.loras(modules("q_proj"))
    m = magnitudes(world.oracle, loras)
    first = next(iter(m))
    whole = files(world.oracle, loras, m)
    await each(
        world.refused(files(world.oracle, loras, {}), "q_proj", "magnitude", "use_dora"),
        world.refused(files(world.oracle, loras, {first: m[first]}), "layers.1.self_attn.q_proj", "magnitude"),
        world.refused(files(world.oracle, loras, m | {first: m[first][:31]}), "lora_magnitude_vector", "[31]", "[32]"),
        world.refused(files(world.oracle, loras, m | {first: m[first] / 0}), "lora_magnitude_vector", "infinite"),
        world.refused(Files(config(target_modules=["q_proj"]), whole.tensors), "lora_magnitude_vector", "DoRA"),
        world.refused(files(world.oracle, loras, m, lora_bias=True), "lora_bias", "use_dora"),
    )


@on("Q")
async def test_a04_dora_on_experts(world: World) -> None:
    loras = world.oracle.loras(experts("down_proj"))
    m = magnitudes(world.oracle, loras)
    await world.refused(files(world.oracle, loras, m), "experts", "DoRA")
