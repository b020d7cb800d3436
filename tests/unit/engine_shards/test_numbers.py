"""An engine of several shards answers as transformers does, base and adapters, whatever shares the step.

Each shard is a thread here, with its own slice of the model, its own pool of adapters, and real sums between them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infinilora.engine.lora.none import NoLora
from infinilora.engine.shards.head import HeadDecoder
from infinilora.engine.shards.messages import Order, Step
from infinilora.protocol import keys
from infinilora.protocol.adapter import Site, manifest_digest
from infinilora.weights.packed import read_header
from support.answers import ingest_answered
from support.engine_shards import ShardedEngine, sharded
from support.engines import TestEngine
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.shard_pools import LIMITS, Pools, error_of, prompt
from support.tiny_models import make_tiny_model

TOLERANCE = 1e-4
EVERYTHING = (*ATTENTION, *MLP)


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("llama", 2),
        ("llama", 4),
        ("llama-tied", 2),
        ("llama-biased", 2),
        ("qwen3", 2),
        ("mixtral", 2),
        ("qwen3_moe", 2),
        ("qwen3_moe", 4),
        ("qwen2_moe", 2),
        ("olmoe", 2),
        ("olmoe-gqa", 4),
    ],
)
def test_the_base_of_every_kind_of_family_equals_transformers(name: str, shards: int, tmp_path: Path) -> None:
    tiny = make_tiny_model(name, tmp_path / name)
    prompts = [prompt(n) for n in (1, 5, 23)]
    with sharded(tiny.directory, shards, lambda _model, _ring: NoLora()) as house:
        engine = TestEngine(house.model, house.lora, limits=LIMITS)
        heard = [engine.ask(p, max_tokens=4, logprobs=0, prompt_logprobs=0) for p in prompts]
        house.finish(engine)
    oracle = Oracle(tiny.directory)
    for asked, told in zip(prompts, heard, strict=True):
        assert len(told.tokens) == 4
        assert error_of(told, asked, oracle) < TOLERANCE


@contextmanager
def coupled(directory: Path, shards: int, work: Path) -> Iterator[tuple[ShardedEngine, Pools]]:
    pools = Pools(work)
    try:
        with sharded(directory, shards, pools.lora_of) as house:
            yield house, pools
            house.lora.close()
    finally:
        pools.close()


@pytest.mark.parametrize(
    ("name", "shards", "targets"),
    [
        pytest.param(name, shards, targets, id=f"{name}-{shards}")
        for name, shards, targets in [
            ("llama", 2, [EVERYTHING, ATTENTION, ("embed_tokens", "lm_head", "o_proj")]),
            ("llama", 4, [EVERYTHING, ("o_proj",), MLP]),
            ("llama-tied", 2, [EVERYTHING, ("k_proj", "v_proj")]),
            ("llama-biased", 2, [EVERYTHING, ("down_proj", "o_proj")]),
            ("mixtral", 2, [("w1", "w2", "w3"), (*ATTENTION, "w1", "w2", "w3", "gate")]),
            ("qwen3_moe", 2, [(*EVERYTHING, "gate"), ("down_proj",)]),
            ("qwen2_moe", 2, [(*EVERYTHING, "gate", "shared_expert_gate"), ("down_proj", "o_proj")]),
        ]
    ],
)
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_adapters_of_every_target_equal_an_explicit_merge(
    name: str,
    shards: int,
    targets: list[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    halves: bool,
) -> None:
    tiny = make_tiny_model(name, tmp_path / name)
    asked = [prompt(7 + i) for i in range(len(targets))]
    with coupled(tiny.directory, shards, tmp_path) as (house, pools):
        adapters = [
            write_adapter(tmp_path / f"a{i}", tiny.directory, rank=3 + 2 * i, targets=t, seed=i, std=0.25)
            for i, t in enumerate(targets)
        ]
        digests = [pools.add(adapter, house.model.card) for adapter in adapters]
        engine = TestEngine(house.model, house.lora, limits=LIMITS, halves=halves)
        steps = steps_told(house, monkeypatch)
        options: dict[str, Any] = {"max_tokens": 4, "logprobs": 0, "prompt_logprobs": 0}
        heard = [engine.ask(p, digest=d, **options) for p, d in zip(asked, digests, strict=True)]
        beside = engine.ask(asked[0], **options)
        house.finish(engine)
    assert any(step.cut for step in steps) == halves
    oracle = Oracle(tiny.directory)
    assert error_of(beside, asked[0], oracle) < TOLERANCE
    for told, ids, adapter in zip(heard, asked, adapters, strict=True):
        assert oracle.effect(ids, adapter) > 0.1
        assert error_of(told, ids, oracle, adapter) < TOLERANCE, adapter


def test_each_shards_pool_holds_its_share_of_an_adapter_and_no_more(tmp_path: Path) -> None:
    tiny = make_tiny_model("qwen3_moe", tmp_path / "model")
    adapter = write_adapter(tmp_path / "a", tiny.directory, rank=8, targets=(*EVERYTHING, "gate"), seed=1)
    with coupled(tiny.directory, 2, tmp_path) as (house, pools):
        digest = pools.add(adapter, house.model.card)
        engine = TestEngine(house.model, house.lora, limits=LIMITS)
        engine.ask(prompt(5), digest=digest, max_tokens=1)
        house.finish(engine)
        held = [pool._tenancies.wanted[digest] for pool in pools.made]
    with (tmp_path / "a.packed").open("rb") as file:
        whole = read_header(file).manifest
    experts = sum(entry.num_bytes for entry in whole.sites if entry.num_experts)
    for of_shard in held:
        assert experts / 2 < sum(of_shard.layer_bytes) < experts / 2 + 0.9 * (whole.data_bytes - experts)
    routers = [any(sites >> Site.ROUTER & 1 for sites in of_shard.layer_sites) for of_shard in held]
    assert sorted(routers) == [False, True], "the head alone routes"


def steps_told(house: ShardedEngine, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """What a follower is told to run from now on."""
    assert isinstance(house.model.decoder, HeadDecoder)
    follower, steps = house.model.decoder._followers[0], list[Step]()
    send = follower.send

    def noted(message: Order) -> None:
        if isinstance(message, Step):
            steps.append(message)
        send(message)

    monkeypatch.setattr(follower, "send", noted)
    return steps


def test_column_scales_of_dora_are_cut_with_their_columns(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama", tmp_path / "llama")
    adapter = write_adapter(tmp_path / "a", tiny.directory, rank=3, targets=EVERYTHING, seed=5, std=0.25, dora=True)
    with coupled(tiny.directory, 2, tmp_path) as (house, pools):
        packed = tmp_path / "dora.packed"
        digest = manifest_digest(ingest_answered(adapter, house.model.card, tiny.directory, packed))
        pools.blobs.put_file(keys.packed(digest), packed)
        engine = TestEngine(house.model, house.lora, limits=LIMITS)
        heard = engine.ask(prompt(9), digest=digest, max_tokens=4, logprobs=0, prompt_logprobs=0)
        house.finish(engine)
    assert error_of(heard, prompt(9), Oracle(tiny.directory), adapter) < TOLERANCE
