"""An engine's remote back-end and the scripted groups that it knows."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.grouplink import Identity
from infinilora.engine.lora.interface import Lease, LeaseStatus
from infinilora.engine.lora.remote import RemoteLora
from infinilora.link.open import LinkSettings
from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.ids import Digest
from infinilora.runtime.rpc import Channels
from support.cards import make_card
from support.groups import ScriptedGroup
from support.waiting import eventually

CARD = make_card("qwen3_moe", num_layers=2, num_experts=4, intermediate=24)
SITES = [sum(1 << s for s in (Site.QKV, Site.O, Site.MOE_GATE_UP, Site.MOE_DOWN))] * 3

BUFFER_BYTES = 16384


class Fleet:
    """A remote back-end and the groups it knows."""

    def __init__(
        self,
        directory: Path | None,
        *,
        card: BaseCard = CARD,
        layer_sites: Sequence[int] = SITES,
        dtype: str = "F32",
        least_buffer_bytes: int = 0,
    ) -> None:
        self._layer_sites = list(layer_sites)
        self.settings = LinkSettings(directory=directory, num_buffers=4, buffer_bytes=BUFFER_BYTES)
        self.channels = Channels()
        self.rings = 0
        identity = Identity(
            engine_id="e",
            incarnation="1",
            base=card.fingerprint,
            dtype=dtype,
            max_rows=64,
            least_buffer_bytes=least_buffer_bytes,
        )
        self.lora = RemoteLora(card, identity, channels=self.channels, link=self.settings, on_change=self._ring)
        self.groups: list[ScriptedGroup] = []

    def _ring(self) -> None:
        self.rings += 1

    def group(self, name: str) -> ScriptedGroup:
        sites = self._layer_sites
        self.groups.append(ScriptedGroup(name, self.settings, num_layers=len(sites), layer_sites=sites))
        return self.groups[-1]

    def know(self, *groups: ScriptedGroup, bytes_free: int = 100) -> None:
        self.lora.update_groups(
            [
                Group(name=g.name, address=g.address, incarnation="i", bytes_free=bytes_free - n)
                for n, g in enumerate(groups)
            ]
        )

    async def linked(self, *names: str) -> None:
        await eventually(lambda: set(self.lora.open_links) == set(names), f"links to {names}")

    async def lease(self, digest: Digest) -> Lease:
        self.lora.want(digest)
        return await self.resident(digest)

    async def resident(self, digest: Digest) -> Lease:
        await eventually(lambda: self.lora.view(digest).status is LeaseStatus.RESIDENT, f"{digest} resident")
        lease = self.lora.view(digest).lease
        assert lease is not None
        return lease

    def drop(self, *digests: Digest) -> None:
        for digest in digests:
            self.lora.drop(digest)


@asynccontextmanager
async def fleet(
    directory: Path | None,
    *,
    card: BaseCard = CARD,
    layer_sites: Sequence[int] = SITES,
    dtype: str = "F32",
    least_buffer_bytes: int = 0,
) -> AsyncIterator[Fleet]:
    """The back-end runs for the length of the block, and is checked for what it leaves. Without a directory: `tcp`."""
    made = Fleet(directory, card=card, layer_sites=layer_sites, dtype=dtype, least_buffer_bytes=least_buffer_bytes)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(made.lora.run())
        try:
            yield made
        finally:
            made.lora.close()
            running.cancel()
    made.lora.check()
    await made.channels.close()
    for group in made.groups:
        group.close()
