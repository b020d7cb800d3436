"""A LoRA server on a device as a process of its own: its door, its pool, its serving threads, and `cuda` links.

    python tests/support/cuda_lora_server.py WORK GROUP device|host

WORK has `memory`, which stands for the GPUs' where there is none, `store`, and `card.json`. Prints its address, and
ends when its standard input does. From SIGUSR1 on its kernels hang, and all else of it lives.
"""

import asyncio
import os
import signal as signals
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from infinilora.link.cuda_driver import Regions
from infinilora.link.open import LinkSettings, Opener
from infinilora.lora_server.leases import SERVICE, Identity, LoraServer
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.protocol.adapter import BaseCard
from infinilora.runtime import rpc
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.runtime.telemetry import Telemetry
from infinilora.runtime.watchdog import Watchdog
from support.every_site import living
from support.interpreted_kernels import device_and_kernels
from support.loopback_memory import memory_of

NUM_SLOTS = 4


def make_pool(work: Path, group: str, card: BaseCard, gate: threading.Event) -> AdapterPool:
    device, kernels = device_and_kernels(num_slots=NUM_SLOTS, num_layers=card.num_layers + 1)
    compute = kernels.dense

    def dense(*arguments: Any, **more: Any) -> None:
        gate.wait()
        compute(*arguments, **more)

    kernels.dense = dense  # type: ignore[method-assign]
    config = PoolConfig(
        base=card.fingerprint,
        num_layers=card.num_layers,
        capacity_bytes=8 << 20,
        num_slots=NUM_SLOTS,
        cache_dir=work / f"cache-{group}",
        cache_bytes=8 << 20,
        device=device,
    )
    return AdapterPool(config, DirectoryBlobs(work / "store"), kernels, on_death=_die)


def _until_the_end(gate: threading.Event) -> None:
    """Of standard input; then whatever hangs goes on. Not by the loop: the end of a link waits for its last call."""
    sys.stdin.read()
    gate.set()


def _die(error: BaseException) -> None:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)


async def main(directory: str, group: str, signal: str) -> None:
    work = Path(directory)
    card = msgspec.json.decode((work / "card.json").read_bytes(), type=BaseCard)
    regions = Regions(memory_of(work / "memory", has_mps=signal == "device"))
    opener = Opener(LinkSettings(directory=None, cuda=regions, num_buffers=4, buffer_bytes=4096))
    gate = threading.Event()
    gate.set()
    signals.signal(signals.SIGUSR1, lambda *_: gate.clear())
    pool = make_pool(work, group, card, gate)
    async with living() as service:
        identity, watchdog = Identity(group, card.fingerprint), Watchdog(600, service.stuck)
        server = LoraServer(identity, pool, opener, service, watchdog=watchdog, traces=Telemetry())
        async with rpc.serving("127.0.0.1:0", [(SERVICE, server)], grace_s=0.5) as listening:
            print(listening.address, flush=True)
            await asyncio.to_thread(_until_the_end, gate)
            server.close()
    pool.close()
    opener.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
