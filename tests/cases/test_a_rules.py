"""Class A, the configuration: what it means, what may be ignored, and what must not be."""

from pathlib import Path
from typing import Any

import pytest

from support.cases import ATTENTION, Files, config, experts, keyed, modules, without
from support.worlds import World, each, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")


@on("L")
async def test_a01_rank_and_alpha_of_each_module(world: World) -> None:
    q0, k0, q1, k1 = modules("q_proj", "k_proj")
    loras = world.oracle.loras([q0], rank=16) | world.oracle.loras([k0, q1, k1], rank=8, seed=1)
    settings = config(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj"],
        rank_pattern={"layers.0.self_attn.q_proj": 16},
        alpha_pattern={"layers.1.self_attn.k_proj": 64},
    )
    changes = world.oracle.merge(loras, {q0: 1.0, k0: 2.0, q1: 2.0, k1: 8.0})
    entry = await world.exact(Files(settings, keyed(loras)), changes)
    assert entry["max_rank"] == 16


@on("L")
async def test_a03_rslora_divides_by_the_root_of_the_rank(world: World) -> None:
    loras = world.oracle.loras(QV, rank=16)
    for flag, scale in ((True, 4.0), (False, 1.0)):
        settings = config(r=16, lora_alpha=16, use_rslora=flag)
        await world.exact(Files(settings, keyed(loras)), world.oracle.merge(loras, scale))
    other = world.oracle.logits(range(12), world.oracle.merge(loras, 1.0))
    assert (world.oracle.logits(range(12), world.oracle.merge(loras, 4.0)) - other).abs().max() > 0.3


@on("L")
async def test_a13_targets_as_one_string_or_none(world: World) -> None:
    loras = world.oracle.loras(QV)
    changes, tensors = world.oracle.merge(loras, 2.0), keyed(loras)
    await each(
        world.exact(Files(config(target_modules=r".*self_attn\.(q|v)_proj"), tensors), changes),
        world.exact(Files(config(target_modules="all-linear"), tensors), changes),
        world.exact(Files(without(config(), "target_modules"), tensors), changes),
        world.exact(
            Files(config(target_modules=[], target_parameters=["q_proj.weight", "v_proj.weight"]), tensors), changes
        ),
        world.refused(Files(config(target_modules="q_proj"), tensors), "target", "q_proj"),
        world.refused(Files(config(target_modules=[]), tensors), "target"),
    )


@on("L")
async def test_a14_dotted_targets(world: World) -> None:
    down = "model.layers.1.mlp.down_proj"
    loras = world.oracle.loras([*modules("q_proj", "gate_proj", "up_proj"), down])
    settings = config(target_modules=["self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", down])
    await world.exact(Files(settings, keyed(loras)), world.oracle.merge(loras, 2.0))


@on("L")
async def test_a15_a_config_that_names_less_than_the_file_holds(world: World) -> None:
    tensors = keyed(world.oracle.loras(QV))
    (q0, _), (v0, v1) = modules("q_proj"), modules("v_proj")
    await each(
        world.refused(Files(config(target_modules=["q_proj"]), tensors), v0, v1),
        world.refused(Files(config(exclude_modules=["v_proj"]), tensors), v0, v1),
        world.refused(Files(config(layers_to_transform=[1]), tensors), q0, v0),
    )


@on("Q")
async def test_a17_layers_to_transform_does_not_count_experts(world: World) -> None:
    settings = config(target_modules=["up_proj"], layers_to_transform=[1], r=2, lora_alpha=4)
    today = world.oracle.loras(experts("up_proj", layers=[1]), rank=2, std=0.5)
    old = world.oracle.loras(experts("up_proj", numbers=[1]), rank=2, std=0.6)
    await each(*(world.exact(Files(settings, keyed(loras)), world.oracle.merge(loras, 2.0)) for loras in (today, old)))


@on("L")
async def test_a18_layer_replication(world: World) -> None:
    loras = world.oracle.loras(QV)
    upper = {key.replace("layers.0", "layers.2").replace("layers.1", "layers.3"): t for key, t in keyed(loras).items()}
    deeper = keyed(loras) | upper
    assert len(deeper) == 16
    await each(
        world.exact(Files(config(layer_replication=None), keyed(loras)), world.oracle.merge(loras, 2.0)),
        world.refused(Files(config(layer_replication=[[0, 2], [0, 2]]), deeper), "layer_replication"),
    )


@on("L")
async def test_a20_how_the_training_began_is_history(world: World) -> None:
    loras = world.oracle.loras(QV)
    settings: list[dict[str, Any]] = [
        config(init_lora_weights=True),
        config(init_lora_weights=False),
        config(init_lora_weights="gaussian", loftq_config={}, corda_config=None),
        config(init_lora_weights="eva", eva_config={"rho": 2.0, "tau": 0.99, "adjust_scaling_factors": True}),
        config(init_lora_weights="orthogonal"),
    ]
    changes = world.oracle.merge(loras, 2.0)
    await each(*(world.exact(Files(one, keyed(loras)), changes) for one in settings))


def began_with(first: Files, root: Path, kind: str) -> dict[str, bytes]:
    """The files of first values, below the directory of their kind."""
    directory = first.write(root / "first" / kind)
    return {f"{kind}_init/{path.name}": path.read_bytes() for path in directory.iterdir()}


@on("L")
async def test_a20_what_training_took_out_of_the_base_is_taken_away_again(world: World) -> None:
    """PiSSA and the like change the base: served with the first values beside, refused without."""
    loras, began = world.oracle.loras(QV, seed=201), world.oracle.loras(QV, seed=202)
    changes = [*world.oracle.merge(loras, 2.0), *world.oracle.merge(began, -2.0)]
    plain = Files(config(init_lora_weights=True), keyed(began))
    beside = {kind: began_with(plain, world.root, kind) for kind in ("pissa", "olora", "corda", "lora_ga")}
    for kind, more in beside.items():
        settings = config(init_lora_weights=kind)
        whole = Files(settings, keyed(loras), more)
        await world.exact(whole, changes)
        await world.exact_from(world.put(f"a20/{kind}", whole), changes, name=f"a20-{kind}")
        await world.refused(Files(settings, keyed(loras)), kind, "pissa_init/")
    unconverted = Files(config(init_lora_weights=True), keyed(loras), beside["olora"])
    await each(
        world.refused(unconverted, "init_lora_weights", "olora_init/"),
        world.refused(Files(config(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}), keyed(loras)), "loftq"),
    )


@on("L")
async def test_a21_unknown_keys_that_say_nothing(world: World) -> None:
    loras = world.oracle.loras(QV)
    nulls = ("arrow_config", "kasa_config", "lora_ga_config", "monteclora_config", "use_bdlora", "velora_config")
    inert: dict[str, Any] = {
        "peft_version": "9.9",
        **dict.fromkeys(nulls),
        "ensure_weight_tying": False,
        "use_qalora": False,
        "qalora_group_size": 16,
        "future_flag": False,
        "future_dict": {},
    }
    of_swift = {"lora_dtype": None, "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-06}
    changes = world.oracle.merge(loras, 2.0)
    await each(*(world.exact(Files(config(**more), keyed(loras)), changes) for more in (inert, of_swift)))


@on("L")
async def test_a22_unknown_keys_that_are_active(world: World) -> None:
    tensors = keyed(world.oracle.loras(QV))
    active: dict[str, Any] = {
        "alora_invocation_tokens": [6, 7],
        "use_qalora": True,
        "use_bdlora": {"nblocks": 2},
        "velora_config": {"rank": 1},
        "arrow_config": {"top_k": 2},
        "future_feature": {"x": 1},
    }
    await each(*(world.refused(Files(config(**{key: value}), tensors), key) for key, value in active.items()))


@on("L")
async def test_a23_another_kind_of_adapter(world: World) -> None:
    tensors = keyed(world.oracle.loras(QV))
    kinds = ("IA3", "LOHA", "LOKR", "VERA", "ADALORA", "PROMPT_TUNING", "P_TUNING", "BOFT")
    await each(
        *(world.refused(Files(config(peft_type=kind), tensors), kind, "LORA") for kind in kinds),
        world.refused(Files(without(config(), "peft_type"), tensors), "peft_type", "LORA"),
    )


@on("L")
async def test_a26_optional_keys_that_are_missing(world: World) -> None:
    loras = world.oracle.loras(QV)
    changes = world.oracle.merge(loras, 2.0)
    optional = ("inference_mode", "lora_dropout", "bias", "task_type", "lora_alpha", "target_modules", "use_rslora")
    settings = [without(config(), key) for key in (*optional, "rank_pattern", "fan_in_fan_out")]
    settings.append(config(use_rslora=None, bias=None, rank_pattern=None, fan_in_fan_out=None, r=4.0))
    await each(*(world.exact(Files(one, keyed(loras)), changes) for one in settings))


@on("L")
async def test_a46_where_the_base_was_found_in_training(world: World) -> None:
    loras = world.oracle.loras(QV)
    changes = world.oracle.merge(loras, 2.0)
    paths = (None, "/home/user/models/x", "some-company/gated-model", "some-company/model-bnb-4bit")
    await each(*(world.exact(Files(config(base_model_name_or_path=path), keyed(loras)), changes) for path in paths))


@on("L")
async def test_a48_fan_in_fan_out_of_linear_layers(world: World) -> None:
    loras = world.oracle.loras(modules(*ATTENTION))
    settings = config(fan_in_fan_out=True, target_modules=list(ATTENTION))
    await world.exact(Files(settings, keyed(loras)), world.oracle.merge(loras, 2.0))
