"""A LoRA server in the test's own process: door, pool and serving threads, and an engine's back-end linked to it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.grouplink import Identity as EngineIdentity
from infinilora.engine.lora.remote import RemoteLora
from infinilora.link.narrow import Narrowing
from infinilora.link.open import LinkSettings, Opener
from infinilora.link.rdma import Fabric
from infinilora.lora_server.leases import SERVICE, Identity, LoraServer
from infinilora.runtime import rpc
from infinilora.runtime.rpc import Channels
from infinilora.runtime.service import Service
from infinilora.runtime.telemetry import Telemetry
from infinilora.runtime.watchdog import Watchdog
from support.every_site import BASE_ROWS, COUNTS, Case, is_idle
from support.waiting import eventually

FIRST_LIFE = "i"
"""The incarnation of the server that the engine hears of."""


@asynccontextmanager
async def remote(
    case: Case, service: Service, backend: str, *, narrowing: Narrowing = "never", fabrics: Sequence[Fabric] = ()
) -> AsyncIterator[RemoteLora]:
    """A LoRA server's door, pool and serving threads in this process, and an engine's back-end linked to it.

    `backend`: of the link that comes of it. `fabrics`: what engine and server lend to rdma links.
    """
    directory = case.work if backend == "shm" else None
    link = LinkSettings(directory=directory, num_buffers=4, buffer_bytes=8192, narrowing=narrowing)
    of_engine, of_server = (replace(link, rdma=fabric) for fabric in fabrics or (None, None))
    pool, opener = case.pool("remote"), Opener(of_server)
    watchdog = Watchdog(60, service.stuck)
    server = LoraServer(
        Identity("g", case.card.fingerprint), pool, opener, service, watchdog=watchdog, traces=Telemetry()
    )
    identity = EngineIdentity(
        engine_id="e", incarnation="1", base=case.card.fingerprint, dtype="F32", max_rows=sum(COUNTS) + BASE_ROWS
    )
    async with rpc.serving("127.0.0.1:0", [(SERVICE, server)], grace_s=0.5) as listening, Channels() as channels:
        lora = RemoteLora(case.card, identity, channels=channels, link=of_engine, on_change=lambda: None)
        running = service.spawn(lora.run(), "links")
        lora.update_groups([Group(name="g", address=listening.address, incarnation=FIRST_LIFE)])
        await eventually(lambda: lora.open_links == {"g": backend}, "the link is open")
        yield lora
        lora.close()
        running.cancel()
        await eventually(lambda: not server.open_links, "the server saw the end of the link")
    opener.close()
    await eventually(partial(is_idle, pool), "the pool is idle")
    pool.close()
