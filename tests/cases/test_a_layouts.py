"""Class A, the tensors: every family's names, experts in every layout, dtypes, and shapes that do not fit."""

import pytest
import torch
from torch import Tensor

from support.cases import PREFIX, Change, Files, Loras, config, experts, keyed, modules
from support.worlds import World, each, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def as_mixtral(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys under the names that Mixtral had when most of its adapters were trained."""
    made = {}
    for key, tensor in tensors.items():
        name = key.replace(".mlp.", ".block_sparse_moe.")
        for today, then in MIXTRAL.items():
            name = name.replace(f".{today}.", f".{then}.")
        made[name] = tensor
    return made


@on("L")
async def test_a28_an_adapter_name_left_in_the_keys(world: World) -> None:
    loras = world.oracle.loras(QV)
    changes = world.oracle.merge(loras, 2.0)
    form = PREFIX + "{module}.lora_{half}.%s.weight"
    two = {
        key.replace("default", "other") if "layers.1" in key else key: t
        for key, t in keyed(loras, form % "default").items()
    }
    await each(
        *(world.exact(Files(config(), keyed(loras, form % name)), changes) for name in ("default", "ranking", "lora")),
        world.refused(Files(config(), two), "default", "other"),
    )


@on("L")
async def test_a29_an_mlx_adapter(world: World) -> None:
    loras = world.oracle.loras(QV, std=0.07)
    tensors = {f"{m}.lora_{half}": t.T for m, (a, b) in loras.items() for half, t in (("a", a), ("b", b))}
    settings = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 20.0}}
    files = Files(settings, tensors, weights="adapters.safetensors")
    await world.exact(files, world.oracle.merge(loras, 20.0))


@on("M")
async def test_a31_mixtral_experts_by_w1_w2_w3(world: World) -> None:
    loras = world.oracle.loras(experts(*GATED), rank=2)
    settings = config(r=2, lora_alpha=4, target_modules=["w1", "w2", "w3"])
    await world.exact(Files(settings, as_mixtral(keyed(loras))), world.oracle.merge(loras, 2.0))


@on("Q")
async def test_a32_qwen_experts_one_by_one(world: World) -> None:
    assert world.oracle.experts_reached() == 4, "the prompt leaves an expert out"
    routed = world.oracle.loras(experts(*GATED), rank=2)
    both = routed | world.oracle.loras(modules("q_proj", "v_proj"), rank=2, seed=1)
    settings = config(r=2, lora_alpha=4, target_modules=[*GATED, "q_proj", "v_proj"])
    alone = config(r=2, lora_alpha=4, target_modules=list(GATED))
    await each(
        world.exact(Files(settings, keyed(both)), world.oracle.merge(both, 2.0)),
        world.exact(Files(alone, keyed(routed)), world.oracle.merge(routed, 2.0)),
    )


def stacked(leaf: str, a: tuple[int, ...], b: tuple[int, ...], *, seed: int) -> tuple[dict[str, Tensor], list[Change]]:
    """Both layers' experts as 3-D tensors, and what they add to the fused weights: each plane its own expert's."""
    dice = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    changes = []
    for layer in (0, 1):
        module = f"model.layers.{layer}.mlp.experts.{leaf}"
        lora_a, lora_b = torch.randn(a, generator=dice) * 0.3, torch.randn(b, generator=dice) * 0.3
        tensors |= {f"{PREFIX}{module}.lora_A": lora_a, f"{PREFIX}{module}.lora_B": lora_b}
        changes.append(Change(module, 2 * (lora_b @ lora_a)))
    return tensors, changes


@on("Q")
async def test_a36_experts_stacked_and_shared_outer(world: World) -> None:
    settings = config(r=2, lora_alpha=4, target_modules=["gate_up_proj", "down_proj"])
    own, changes = stacked("gate_up_proj", (4, 2, 32), (4, 48, 2), seed=1)
    outer, outer_changes = stacked("gate_up_proj", (1, 2, 32), (4, 48, 2), seed=2)
    down, down_changes = stacked("down_proj", (4, 2, 24), (1, 32, 2), seed=3)
    await each(
        world.exact(Files(settings | {"target_modules": ["gate_up_proj"]}, own), changes),
        world.exact(Files(settings, outer | down), outer_changes + down_changes),
    )


@on("M")
async def test_a36_mixtrals_experts_stacked(world: World) -> None:
    tensors: dict[str, Tensor] = {}
    changes = []
    dice = torch.Generator().manual_seed(36)
    for layer in (0, 1):
        a, b = torch.randn(4, 2, 32, generator=dice) * 0.3, torch.randn(4, 24, 2, generator=dice) * 0.3
        module = f"{PREFIX}model.layers.{layer}.block_sparse_moe.w1"
        tensors |= {f"{module}.lora_A": a, f"{module}.lora_B": b}
        gate = (slice(None), slice(0, 24))
        changes.append(Change(f"model.layers.{layer}.mlp.experts.gate_up_proj", 2 * (b @ a), gate))
    await world.exact(Files(config(r=2, lora_alpha=4, target_modules=["w1"]), tensors), changes)


@on("M")
async def test_a37_some_experts_or_half_a_gated_pair(world: World) -> None:
    settings = config(r=2, lora_alpha=4, target_modules=["w1", "w2", "w3"])
    ranks = settings | {"rank_pattern": {r"experts\.3\.w[123]": 4}}
    chosen: list[Loras] = [
        world.oracle.loras(experts(*GATED, numbers=[3]), rank=2, std=0.4),
        world.oracle.loras(experts("gate_proj", "down_proj"), rank=2),
        world.oracle.loras(experts("down_proj"), rank=2, std=0.3),
    ]
    unlike = world.oracle.loras(experts(*GATED, numbers=[0, 1, 2]), rank=2)
    wide = world.oracle.loras(experts(*GATED, numbers=[3]), rank=4, seed=1)
    changes = world.oracle.merge(unlike, 2.0) + world.oracle.merge(wide, 1.0)
    await each(
        *(world.exact(Files(settings, as_mixtral(keyed(one))), world.oracle.merge(one, 2.0)) for one in chosen),
        world.exact(Files(ranks, as_mixtral(keyed(unlike | wide))), changes),
    )


async def moves_the_router(world: World, settings: dict[str, object], *, is_mixtral: bool) -> None:
    loras = world.oracle.loras([f"model.layers.{layer}.mlp.gate" for layer in (0, 1)], rank=2, std=0.8)
    changes = world.oracle.merge(loras, 2.0)
    assert world.oracle.choices(changes) != world.oracle.choices(), "no token changes its experts"
    tensors = as_mixtral(keyed(loras)) if is_mixtral else keyed(loras)
    entry = await world.exact(Files(settings, tensors), changes)
    await each(world.serves(entry["name"], changes), world.serves("tiny"), world.serves(entry["name"], changes))


@on("M")
async def test_a38_the_router_of_mixtral(world: World) -> None:
    await moves_the_router(world, config(r=2, lora_alpha=4, target_modules=["gate"]), is_mixtral=True)


@on("Q")
async def test_a38_the_router_of_qwen(world: World) -> None:
    await moves_the_router(world, config(r=2, lora_alpha=4, target_modules=["gate"]), is_mixtral=False)


@on("Q2")
async def test_a39_the_shared_expert_and_its_gate(world: World) -> None:
    homes = [f"model.layers.{layer}.mlp" for layer in (0, 1)]
    shared = world.oracle.loras([f"{home}.shared_expert.{leaf}" for home in homes for leaf in GATED], rank=2, std=0.3)
    gate = world.oracle.loras([f"{home}.shared_expert_gate" for home in homes], rank=2, std=0.6, seed=1)
    settings = config(r=2, lora_alpha=4, target_modules=list(GATED))
    with_gate = settings | {"target_modules": [*GATED, "shared_expert_gate"]}
    alone = settings | {"target_modules": ["shared_expert_gate"]}
    await each(
        world.exact(Files(settings, keyed(shared)), world.oracle.merge(shared, 2.0)),
        world.exact(Files(with_gate, keyed(shared | gate)), world.oracle.merge(shared | gate, 2.0)),
        world.exact(Files(alone, keyed(gate)), world.oracle.merge(gate, 2.0)),
    )


@on("L/bf16")
async def test_a41_dtypes_unlike_the_bases(world: World) -> None:
    loras = world.oracle.loras(QV)

    def narrowed(kind: torch.dtype) -> Loras:
        return {module: (a.to(kind), b.to(kind)) for module, (a, b) in loras.items()}

    kinds = (torch.float32, torch.float16, torch.bfloat16)
    mixed = {m: (a.half(), b) if "q_proj" in m else (a, b.bfloat16()) for m, (a, b) in loras.items()}
    # alpha / r * B is beyond what 16 bits of float16 hold; A makes up for it.
    large = {m: ((a * 1e-5).half(), b.half()) for m, (a, b) in loras.items()}
    await each(
        *(
            world.exact(Files(config(), keyed(one)), world.oracle.merge(one, 2.0))
            for one in (*(narrowed(kind) for kind in kinds), mixed)
        ),
        world.exact(Files(config(lora_alpha=8e5), keyed(large)), world.oracle.merge(large, 2e5)),
        world.refused(Files(config(), keyed(narrowed(torch.float8_e4m3fn))), "F8_E4M3"),
    )


@on("L")
async def test_a42_shapes_that_do_not_fit(world: World) -> None:
    loras = world.oracle.loras(QV)
    (q0, _), (v0, _) = modules("q_proj"), modules("v_proj")
    turned = {m: (a.T, b) for m, (a, b) in loras.items()}
    wide = {m: (torch.ones(4, 64), torch.ones(64, 4)) for m in loras}
    ungrouped = loras | {v0: (loras[v0][0], torch.ones(32, 4))}
    square = world.oracle.loras(modules("q_proj"), rank=32)
    read_turned = {m: (a.T, b) for m, (a, b) in square.items()}
    await each(
        world.refused(Files(config(), keyed(turned)), f"{q0}.lora_A.weight", "[32, 4]", "[4, 32]"),
        world.refused(Files(config(), keyed(wide)), f"{q0}.lora_", "64", "32"),
        world.refused(Files(config(), keyed(ungrouped)), f"{v0}.lora_B.weight", "[32, 4]", "[16, 4]"),
        world.exact(
            Files(config(r=32, lora_alpha=64, target_modules=["q_proj"]), keyed(read_turned)),
            world.oracle.merge(read_turned, 2.0),
        ),
    )


@on("L")
async def test_a44_an_adapter_without_contents(world: World) -> None:
    shards = {key: torch.zeros(0) for key in keyed(world.oracle.loras(QV))}
    hollow = Files(config(), None, {"adapter_model.safetensors": b""})
    await each(
        world.refused(Files(config(), {}), "no LoRA tensors"),
        world.refused(Files(config(), shards), "no LoRA tensors"),
        world.refused(hollow, "adapter_model.safetensors"),
    )


@on("L")
async def test_a45_half_a_pair(world: World) -> None:
    tensors = keyed(world.oracle.loras(QV))
    v0 = modules("v_proj")[0]
    for half in "AB":
        left = {key: t for key, t in tensors.items() if f"v_proj.lora_{half}" not in key}
        await world.refused(Files(config(), left), v0, f"lora_{half}")
