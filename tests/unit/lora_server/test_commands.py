"""Commands to a LoRA server: what it does not take is refused by name, and what is resident stays."""

from pathlib import Path

import pytest

from infinilora.lora_server.commands import Commands
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.protocol.control import Command, Forget
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.runtime.blobs import DirectoryBlobs
from support.pools import DefinedKernels


async def test_a_command_that_a_server_does_not_take_is_not_said_to_be_done(tmp_path: Path) -> None:
    config = PoolConfig(
        base=Fingerprint(digest_of(b"base")),
        num_layers=1,
        capacity_bytes=1 << 20,
        num_slots=1,
        cache_dir=tmp_path / "cache",
        cache_bytes=1 << 20,
    )
    deaths: list[BaseException] = []
    pool = AdapterPool(config, DirectoryBlobs(tmp_path / "store"), DefinedKernels(), on_death=deaths.append)
    try:
        with pytest.raises(InvalidRequest, match="takes no forget command; wanted stage, evict, pin or drain"):
            await Commands(pool).handle(Command(command_id="c", epoch=1, body=Forget(digest=digest_of(b"a"))))
    finally:
        pool.close()
    assert not deaths
