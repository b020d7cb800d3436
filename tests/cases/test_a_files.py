"""Class A, the files: side files, pickles, damage, prefixes of a bucket."""

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from typing_extensions import override

from support.cases import Files, config, keyed, modules
from support.worlds import World, each, error_of, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

QV = modules("q_proj", "v_proj")
WEIGHTS = "adapter_model.safetensors"


class Mark:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@on("L")
async def test_a09_side_files_are_left_alone(world: World) -> None:
    loras = world.oracle.loras(QV, seed=9)
    marker = world.root / "unpickled"
    bomb = pickle.dumps(Mark(marker))
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "README.md")
    side = dict.fromkeys(names, b"{}") | {
        "added_tokens.json": json.dumps({"<s>": 1}).encode(),
        "training_args.bin": bomb,
        "optimizer.pt": bomb,
        "checkpoint-5/adapter_model.safetensors": b"older",
        "checkpoint-5/optimizer.pt": bomb,
    }
    await world.exact(Files(config(), keyed(loras), side), world.oracle.merge(loras, 2.0))
    assert not marker.exists()


@on("L")
async def test_a16_a_config_that_names_more_than_the_file_holds(world: World) -> None:
    loras = world.oracle.loras(QV)
    everything = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    entry = await world.exact(Files(config(target_modules=everything), keyed(loras)), world.oracle.merge(loras, 2.0))
    said = json.dumps(entry["warnings"])
    for missing in ("k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert missing in said
    first = {m: pair for m, pair in loras.items() if "layers.0" in m}
    await world.refused(Files(config(), keyed(first)), "model.layers.1")


@on("L")
async def test_a24_ranks_beyond_the_limit_and_beyond_the_width(world: World) -> None:
    (q0, q1) = modules("q_proj")
    settings = config(target_modules=["q_proj"])

    def ranked(rank: int) -> Files:
        return Files(settings | {"r": rank, "lora_alpha": rank}, keyed(world.oracle.loras([q0, q1], rank=rank)))

    def uneven(rank: int) -> Files:
        loras = world.oracle.loras([q0], rank=rank) | world.oracle.loras([q1], rank=8)
        pattern = {"layers.0.self_attn.q_proj": rank}
        return Files(settings | {"r": 8, "rank_pattern": pattern}, keyed(loras))

    wide = world.oracle.loras([q0, q1], rank=64)
    api = await world.factory.another_gateway("gateway-a24", {"INFINILORA_MAX_RANK": "64"})
    strict = dataclasses.replace(world, api=api, root=world.root / "a24")
    await each(
        world.refused(ranked(513), "513", "512"),
        strict.refused(ranked(65), "65", "64", "INFINILORA_MAX_RANK"),
        strict.refused(uneven(128), "128", "64"),
        strict.refused(ranked(1024), "1024", "64"),
        strict.exact(
            Files(settings | {"r": 64, "lora_alpha": 64}, keyed(wide)), world.oracle.merge(wide, 1.0), name="a24"
        ),
        world.serves("good", world.good),
        world.serves("tiny"),
    )


@on("L")
async def test_a40_pickles_are_refused_and_never_run(world: World) -> None:
    loras = world.oracle.loras(QV, seed=40)
    marker = world.root / "ran"
    bomb = {"adapter_model.bin": pickle.dumps(Mark(marker))}
    plain = {"adapter_model.bin": pickle.dumps({"x": 1})}
    await each(
        world.refused(Files(config(), None, plain), "adapter_model.bin", "safetensors"),
        world.refused(Files(config(), None, bomb), "adapter_model.bin", "safetensors"),
        world.exact(Files(config(), keyed(loras), bomb), world.oracle.merge(loras, 2.0)),
    )
    assert not marker.exists()
    pickle.loads(bomb["adapter_model.bin"])
    assert marker.exists(), "a marker that cannot be made proves nothing"


@on("L")
async def test_a43_damaged_and_foreign_files(world: World) -> None:
    loras = world.oracle.loras(QV, seed=43)
    whole = (world.place(Files(config(), keyed(loras))) / WEIGHTS).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    table = json.loads(whole[8 : 8 + length])
    first, second, *_ = (name for name in table if name != "__metadata__")
    table[second]["data_offsets"] = table[first]["data_offsets"]
    header = json.dumps(table).encode().ljust(length)
    damaged = {
        "half": whole[: len(whole) // 2],
        "header": whole[: 8 + length // 2],
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n",
        "page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "endless": (1 << 60).to_bytes(8, "little") + whole[8:],
        "overlap": whole[:8] + header[:length] + whole[8 + length :],
        "longer": whole + b"\0",
    }
    directories = {kind: world.place(Files(config(), None, {WEIGHTS: data})) for kind, data in damaged.items()}
    await each(*(world.refused(directory, WEIGHTS) for directory in directories.values()))
    for text in (b"\xff\xfe{}", b"[]"):
        directory = world.place(Files(config(), keyed(loras)))
        (directory / "adapter_config.json").write_bytes(text)
        await world.refused(directory, "adapter_config.json")
    mended = directories["half"]
    (mended / WEIGHTS).write_bytes(whole)
    await world.exact(mended, world.oracle.merge(loras, 2.0))


@on("L")
async def test_a47_a_declared_base_that_is_another(world: World) -> None:
    loras = world.oracle.loras(QV, seed=47)
    changes = world.oracle.merge(loras, 2.0)
    for declared, is_told in (("company/elsewhere", True), ("company/Tiny", False), ("base-v1", False), (None, False)):
        files = Files(config(base_model_name_or_path=declared), keyed(loras))
        entry = await world.exact(files, changes)
        assert [warning["code"] for warning in entry["warnings"]] == ["declared_base"] * is_told
    strict = await world.factory.another_gateway("gateway-a47", {"INFINILORA_DECLARED_BASE": "refuse"})
    directory = world.place(Files(config(base_model_name_or_path="company/elsewhere"), keyed(loras)))
    answer = await strict.http.post("/v1/adapters", json={"name": "a47", "source": f"file://{directory}"})
    message = error_of(answer, [422])["message"]
    assert all(word in message for word in ("a47", "adapter_config.json", "elsewhere", "tiny"))


@on("L")
async def test_a49_an_adapter_below_the_prefix(world: World) -> None:
    loras = world.oracle.loras(QV, seed=49)
    uri = world.put("t1/a/run1", Files(config(), keyed(loras)))
    world.put("t1/a/run2", Files(config(), keyed(world.oracle.loras(QV, seed=50))))
    for above in (uri.removesuffix("/run1"), uri.removesuffix("run1")):
        message = await world.refused_as({"name": "a49-above", "source": above}, "adapter_config.json", status=[404])
        assert "run" not in message
    changes = world.oracle.merge(loras, 2.0)
    plain = await world.exact_from(uri, changes, name="a49")
    slashed = await world.exact_from(f"{uri}/", changes, name="a49-slash")
    assert plain["digest"] == slashed["digest"]
