"""A group's pools in one process: a head, its followers, and orders and answers carried by a thread for each way."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.pool.device import HostDevice
from infinilora.pool.execute import Grants, SiteCall, StepWork, execute
from infinilora.pool.follower import FollowerPool
from infinilora.pool.group import Order, OtherShards
from infinilora.pool.pool import AdapterPool, PoolConfig, PoolKernels
from infinilora.pool.scales import SiteScale
from infinilora.pool.share import Share
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.shards import HEAD, Shape, Sharding
from infinilora.runtime.blob_store import BlobStore
from support.late_device import LateDevice, LateKernels


class Carrier:
    """Calls what it is given, in order, on a thread of its own. `hold` stops it between two calls."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.gate = threading.Event()
        self.gate.set()
        self.deaths: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def _run(self) -> None:
        while call := self._calls.get():
            self.gate.wait(10)
            try:
                call()
            except BaseException as error:
                self.deaths.append(error)
                raise

    def close(self) -> None:
        self.gate.set()
        self._calls.put(None)
        self._thread.join()


@dataclass
class ToHead:
    """What a follower says, on its way to the head's pool."""

    shard: int
    carrier: Carrier
    head: Callable[[], AdapterPool]

    def ready(self, slot: int, slot_generation: int, count: int, *, scales: Sequence[SiteScale], tier: str) -> None:
        say = partial(self.head().shard_ready, self.shard, slot, slot_generation, count, scales=scales, tier=tier)
        self.carrier.put(say)

    def failed(self, slot: int, slot_generation: int, error: InfiniLoraError) -> None:
        self.carrier.put(partial(self.head().shard_failed, slot, slot_generation, error))

    def emptied(self, slot: int, slot_generation: int) -> None:
        self.carrier.put(partial(self.head().shard_emptied, self.shard, slot, slot_generation))


class GroupOfPools:
    """All shards of one group over one store."""

    def __init__(
        self,
        card: BaseCard,
        shape: Shape,
        blobs: BlobStore,
        work: Path,
        *,
        capacity_bytes: int = 4 << 20,
        num_slots: int = 8,
        host_bytes: int = 0,
        load_share: float = 1.0,
        kernels: Callable[[], PoolKernels] | None = None,
        follower_device: LateDevice | None = None,
    ) -> None:
        """`follower_device`: of all shards but the head, which is a host."""
        self.card = card
        self.sharding = Sharding(shape, card.num_layers, card.sites)
        self.deaths: list[BaseException] = []
        self.up = [Carrier() for _ in range(shape.num_shards)]
        self.down = [Carrier() for _ in range(shape.num_shards)]
        made = kernels or (lambda: SlotKernels(num_slots=num_slots, num_layers=card.num_layers + 1))

        def made_for(shard: int) -> PoolKernels:
            return made() if follower_device is None or shard == HEAD else LateKernels(follower_device)

        def config(shard: int) -> PoolConfig:
            return PoolConfig(
                device=HostDevice() if follower_device is None or shard == HEAD else follower_device,
                base=card.fingerprint,
                num_layers=card.num_layers,
                capacity_bytes=capacity_bytes,
                num_slots=num_slots,
                cache_dir=work / "cache",
                cache_bytes=4 << 20,
                host_bytes=host_bytes,
                load_share=load_share,
                share=Share.of_group(self.sharding, shard),
            )

        self.others = OtherShards(self.sharding, capacity_bytes, self._send)
        self.followers = {
            shard: FollowerPool(
                config(shard),
                Share.of_group(self.sharding, shard),
                blobs,
                made_for(shard),
                ToHead(shard, self.up[shard], lambda: self.head),
                on_death=self.deaths.append,
            )
            for shard in range(1, shape.num_shards)
        }
        self.head = AdapterPool(config(HEAD), blobs, made_for(HEAD), on_death=self.deaths.append, others=self.others)

    def _send(self, shard: int, order: Order) -> None:
        self.down[shard].put(partial(self.followers[shard].obey, order))

    def pool(self, shard: int) -> AdapterPool | FollowerPool:
        return self.head if shard == HEAD else self.followers[shard]

    def grants(self, shard: int, holder: str = "engine") -> Grants:
        return self.pool(shard).grants(holder)

    def run(self, shard: int, work: StepWork, call: SiteCall) -> Tensor:
        """What one shard computes of a call."""
        call.out.fill_(torch.nan)
        execute(self.pool(shard).kernels, self.grants(shard), work, call)
        return call.out

    def check_idle(self) -> None:
        """Raise AssertionError while anything is leased, on its way or being given back, on any shard."""
        self.head.check_idle()
        self.others.check()
        for follower in self.followers.values():
            assert follower._loader.num_loads == 0

    def close(self) -> None:
        self.head.close()
        for follower in self.followers.values():
            follower.close()
        for carrier in (*self.up, *self.down):
            carrier.close()
        deaths = self.deaths + [death for carrier in (*self.up, *self.down) for death in carrier.deaths]
        assert not deaths, deaths
