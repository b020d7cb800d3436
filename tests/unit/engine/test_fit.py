"""An engine in the memory that it may use: what is derived gives way, and what was asked for is refused by the sum."""

import json
from pathlib import Path
from typing import Any

import pytest

from infinilora.engine.assemble import sizes_of
from infinilora.engine.fit import fitted
from infinilora.engine.model.cut import Cut
from infinilora.engine.model.spec import read_spec
from infinilora.engine.needs import Workload, row_numbers, step_bytes, weight_bytes
from infinilora.engine.options import model_options
from infinilora.engine.settings import Settings
from infinilora.protocol.errors import InvalidRequest
from infinilora.runtime.capacity import Limit

MIB = 1 << 20
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def settings(directory: Path, config: dict[str, Any] | None = None, **more: Any) -> Settings:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or DENSE))
    urls: dict[str, Any] = {"nats_url": "nats://n:1", "redis_url": "redis://r:1", "store_url": f"file://{directory}"}
    return Settings(model=directory, load_format="dummy", **urls, **more)


def kv_bytes(own: Settings, left_bytes: int, num_shards: int = 1) -> int:
    """Of one shard, where so much is left to the process."""
    limit = Limit("the limit", left_bytes, left_bytes)
    limit = limit._replace(num_bytes=limit.num_bytes + left_bytes - limit.left_bytes)
    options = fitted(own, model_options(own, num_shards), num_shards, limit)
    return sizes_of(options, read_spec(options.directory), Cut(0, num_shards)).kv_bytes


def test_keys_and_values_get_what_is_left_and_no_more_than_they_would_without_a_limit(tmp_path: Path) -> None:
    own = settings(tmp_path / "m", lora="none", step_tokens=16, max_running=8)
    wanted = kv_bytes(own, 1 << 40)
    assert kv_bytes(own, 64 * MIB) == wanted
    assert 0 < kv_bytes(own, 4 * MIB) < wanted


def test_what_was_asked_for_does_not_give_way(tmp_path: Path) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"lora": "none", "kv_bytes": 64 * MIB}, f"{64 * MIB:,} keys and values"),
        ({"lora": "local", "pool_bytes": 65 * MIB}, f"{65 * MIB:,} adapters in the pool"),
        ({"lora": "local", "pool_bytes": MIB, "host_bytes": 65 * MIB}, f"{65 * MIB:,} adapters in host memory"),
        ({"lora": "remote", "hybrid_bytes": 65 * MIB}, f"{65 * MIB:,} adapters in the pool"),
        ({"lora": "remote", "link_buffer_bytes": MIB}, f"{256 * MIB:,} links"),
    ]
    for more, words in asked:
        with pytest.raises(InvalidRequest, match="not enough memory: the limit is") as refused:
            kv_bytes(settings(tmp_path / "m", step_tokens=16, max_running=8, **more), 64 * MIB)
        assert words in str(refused.value)


def test_shards_of_a_cpu_are_counted_together(tmp_path: Path) -> None:
    own = settings(tmp_path / "m", lora="none", step_tokens=16, max_running=8, kv_bytes=20 * MIB)
    assert kv_bytes(own, 36 * MIB) == 20 * MIB
    with pytest.raises(InvalidRequest, match=f"{40 * MIB:,} keys and values"):
        kv_bytes(own, 36 * MIB, num_shards=2)


def test_weights_are_counted_to_the_number_and_the_step_of_experts_with_every_choice(tmp_path: Path) -> None:
    work = Workload(rows=32, max_running=8, width=4, stored_width=2)
    dense = read_spec(settings(tmp_path / "d").model)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert weight_bytes(dense, Cut(), work) == 4 * 64_000 + 2 * (64_000 + 64 + 2 * layer)
    experts = read_spec(settings(tmp_path / "e", DENSE | EXPERTS).model)
    assert row_numbers(experts) - row_numbers(dense) > 2 * 3 * 96
    assert step_bytes(experts, work) > step_bytes(dense, work) > 8 * 1000 * 4
