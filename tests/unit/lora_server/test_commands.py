"""Commands to a LoRA server, carried out by a real pool over a directory store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infinilora.lora_server.commands import Commands
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.protocol.control import Command, Drain, Evict, Forget, Pin, Stage
from infinilora.protocol.errors import StaleEpoch
from infinilora.protocol.ids import digest_of
from infinilora.runtime.blobs import DirectoryBlobs
from support.cards import make_card
from support.pools import DefinedKernels, Packed, pack
from support.procs import wait_until

CARD = make_card("llama", num_layers=1)


@pytest.fixture
def adapter(tmp_path: Path) -> Packed:
    return pack(tmp_path, DirectoryBlobs(tmp_path / "store"), CARD, seed=1)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[AdapterPool]:
    config = PoolConfig(
        base=CARD.fingerprint,
        num_layers=1,
        capacity_bytes=1 << 20,
        num_slots=2,
        cache_dir=tmp_path / "cache",
        cache_bytes=1 << 20,
    )
    deaths: list[BaseException] = []
    pool = AdapterPool(config, DirectoryBlobs(tmp_path / "store"), DefinedKernels(), on_death=deaths.append)
    yield pool
    pool.check()
    pool.close()
    assert not deaths
    assert not deaths


def order(epoch: int, body: Stage | Evict | Pin | Drain | Forget) -> Command:
    return Command(command_id="c", epoch=epoch, body=body)


async def test_what_is_forgotten_leaves_every_tier(pool: AdapterPool, adapter: Packed) -> None:
    commands = Commands(pool)
    reply = await commands.handle(order(1, Pin(digest=adapter.digest, pinned=True)))
    assert reply.error is None
    wait_until(lambda: pool.resident() == (adapter.digest,), "the pin to be followed")
    wait_until(lambda: pool.tier_bytes()["disk"] > 0, "the cache file")
    await commands.handle(order(1, Forget(digest=adapter.digest)))
    wait_until(lambda: pool.tier_bytes()["disk"] == 0, "the cache file to go")
    assert pool.resident() == ()
    assert pool.load().bytes_free == pool.load().bytes_total
    assert (await commands.handle(order(1, Forget(digest=adapter.digest)))).error is None


async def test_what_it_was_told_to_keep_is_told_on(pool: AdapterPool, adapter: Packed) -> None:
    commands = Commands(pool)
    for pinned in (True, False):
        await commands.handle(order(1, Pin(digest=adapter.digest, pinned=pinned)))
        assert pool.load().pinned == (adapter.digest,) * pinned


async def test_to_forget_what_was_never_here_is_done_at_once(pool: AdapterPool) -> None:
    assert (await Commands(pool).handle(order(1, Forget(digest=digest_of(b"a"))))).error is None


async def test_a_deposed_leader_is_refused(pool: AdapterPool, adapter: Packed) -> None:
    commands = Commands(pool)
    await commands.handle(order(2, Drain(draining=False)))
    with pytest.raises(StaleEpoch, match="epoch 1 was deposed"):
        await commands.handle(order(1, Forget(digest=adapter.digest)))
