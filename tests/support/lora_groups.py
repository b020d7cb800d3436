"""A group of lora-server processes: one for each shard, and an engine's back-end linked to them."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.grouplink import Identity
from infinilora.engine.lora.remote import RemoteLora
from infinilora.link.open import LinkSettings
from infinilora.pool.slices import SiteSlices
from infinilora.protocol import keys
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.shards import HEAD, Shape
from infinilora.runtime.blobs import BlobStore, DirectoryBlobs
from infinilora.runtime.rpc import Channels
from infinilora.runtime.service import Service
from support.lora_servers import LoraServerProcess
from support.procs import NatsServer, ValkeyServer
from support.waiting import eventually


class LoraGroup:
    """The shards of one group, over a directory for a store. `shards[0]` is the head."""

    def __init__(
        self, work: Path, card: BaseCard, shape: Shape, nats: NatsServer, redis: ValkeyServer, **settings: object
    ) -> None:
        self.card = card
        self.shape = shape
        self.work = work
        self.name = f"group-{os.urandom(4).hex()}"
        self.store = work / "store"
        self.blobs: BlobStore = DirectoryBlobs(self.store)
        self.blobs.put(keys.base_card(card.fingerprint), msgspec.json.encode(card))
        self.links = work / "link"
        self.links.mkdir(exist_ok=True)
        shared = {
            "BASE": card.fingerprint,
            "GROUP": self.name,
            "SHAPE": str(shape),
            "NATS_URL": nats.url,
            "REDIS_URL": redis.url,
            "STORE_URL": f"file://{self.store}",
            "LINK_DIR": self.links,
            "LINK_BUFFER_BYTES": 8192,
            **settings,
        }
        self.shards = [LoraServerProcess(work / f"{self.name}-{n}", **shared, SHARD=n) for n in range(shape.num_shards)]
        for shard in self.shards[HEAD + 1 :]:
            shard.settings["HEAD"] = self.shards[HEAD].address

    @property
    def head(self) -> LoraServerProcess:
        return self.shards[HEAD]

    def start(self) -> None:
        """Begin all of them; who wants the group waits until its link is open."""
        for shard in self.shards:
            shard.launch()

    def close(self) -> None:
        for shard in self.shards:
            shard.kill()

    def as_group(self) -> Group:
        return Group(name=self.name, address=self.head.address, incarnation="any")

    @asynccontextmanager
    async def engine(
        self, service: Service, *, backend: str = "shm", others: tuple["LoraGroup", ...] = ()
    ) -> AsyncIterator[RemoteLora]:
        """A back-end with an open link to every shard of this group, and of the others."""
        async with engine_of((self, *others), service, backend=backend) as lora:
            yield lora


@asynccontextmanager
async def engine_of(
    groups: tuple[LoraGroup, ...], service: Service, *, backend: str = "shm", slices: SiteSlices | None = None
) -> AsyncIterator[RemoteLora]:
    """An engine's back-end with an open link to each of these groups. `slices`: of one shard of an engine."""
    first = groups[0]
    link = LinkSettings(directory=first.links if backend == "shm" else None, num_buffers=4, buffer_bytes=8192)
    identity = Identity(
        engine_id="e", incarnation=os.urandom(4).hex(), base=first.card.fingerprint, dtype="F32", max_rows=64
    )
    async with Channels() as channels:
        lora = RemoteLora(first.card, identity, channels=channels, link=link, on_change=lambda: None, slices=slices)
        running = service.spawn(lora.run(), "links")
        lora.update_groups([group.as_group() for group in groups])
        wanted = {group.name: backend for group in groups}
        await eventually(lambda: lora.open_links == wanted, "every group's link is open", timeout_s=200)
        try:
            yield lora
        finally:
            lora.close()
            running.cancel()
            await asyncio.wait([running])
