"""What a LoRA server shows of its tiers is what is in them, and what it says of its group is of all shards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinilora.lora_server.commands import Commands
from infinilora.lora_server.report import beat, show_pool
from infinilora.lora_server.settings import Settings
from infinilora.lora_server.shard import Shard
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.protocol.control import GroupLoad
from infinilora.protocol.ids import digest_of
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.metrics import LoraServerMetrics, new_registry, render
from infinilora.runtime.service import Service
from support.cards import make_card
from support.pools import DefinedKernels, pack
from support.procs import wait_until

CARD = make_card("llama", num_layers=1)


def test_the_gauges_of_the_tiers_rise_and_fall_with_an_adapter(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path / "store")
    adapter = pack(tmp_path, blobs, CARD, seed=1)
    config = PoolConfig(
        base=CARD.fingerprint,
        num_layers=1,
        capacity_bytes=1 << 20,
        num_slots=2,
        cache_dir=tmp_path / "cache",
        cache_bytes=1 << 20,
        host_bytes=1 << 20,
    )
    deaths: list[BaseException] = []
    pool = AdapterPool(config, blobs, DefinedKernels(), on_death=deaths.append)
    registry = new_registry()
    no_links: Any = SimpleNamespace(open_links={})
    show_pool(LoraServerMetrics(registry), pool, no_links)

    def shown(tier: str) -> float:
        name = f'infinilora_tier_bytes{{tier="{tier}"}} '
        return next(
            float(line[len(name) :]) for line in render(registry).decode().splitlines() if line.startswith(name)
        )

    assert (shown("disk"), shown("host")) == (0, 0)
    pool.stage(adapter.digest)
    wait_until((tmp_path / "cache" / f"{adapter.digest[7:]}.safetensors").exists, "the cache file")
    wait_until(lambda: pool.resident() == (adapter.digest,), "the hint to be followed")
    assert shown("disk") == adapter.path.stat().st_size
    assert shown("host") > 0
    pool.forget(adapter.digest)
    wait_until(lambda: (shown("disk"), shown("host")) == (0, 0), "the tiers to be empty")
    pool.close()
    assert not deaths


@pytest.mark.parametrize(("shape", "told"), [("1x1", 500.0), ("2x1", 1000.0), ("1x2", 1000.0)])
async def test_a_groups_speed_is_that_of_its_shards_together(tmp_path: Path, shape: str, told: float) -> None:
    card = make_card("qwen3_moe", num_layers=2, num_experts=4)
    urls: dict[str, Any] = {"nats_url": "nats://n:1", "redis_url": "redis://r:1", "store_url": f"file://{tmp_path}"}
    shard = Shard(Settings(base=card.fingerprint, shape=shape, **urls), card)
    deaths: list[BaseException] = []
    blobs = DirectoryBlobs(tmp_path / "store")
    pool = AdapterPool(shard.pool_config(), blobs, DefinedKernels(), on_death=deaths.append)
    pool.pin(digest_of(b"a"), pinned=True)
    said = beat(shard, Service("test"), pool, Commands(pool), address="here:1", rows_per_s=500.0).load
    assert isinstance(said, GroupLoad)
    assert (said.rows_per_s, said.shape, said.pinned) == (told, shape, (digest_of(b"a"),))
    pool.close()
    assert not deaths
