"""The gateway process: `python -m infinilora.gateway`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from infinilora.gateway.scratch import use_scratch
from infinilora.gateway.settings import Settings
from infinilora.gateway.underway import UnderWay
from infinilora.gateway.wiring import Connections, build, scratch_directory
from infinilora.protocol.control import Beat
from infinilora.runtime import log, telemetry
from infinilora.runtime.blobs import open_blobs
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.listening import listen_on
from infinilora.runtime.members import Heart, Members
from infinilora.runtime.rpc import Channels
from infinilora.runtime.service import Service, run
from infinilora.runtime.settings import read
from infinilora.runtime.store import RedisStore
from infinilora.runtime.watched_blobs import WatchedBlobs

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that none is closed under a request on its way."""
LAST_WORDS_S = 1.0
"""For answers that the grace time was too short for: their clients are told within it."""
ENDING_S = 3.0
"""Beyond the grace time, for these and for what the bus has still to be sent."""


async def serve(service: Service, settings: Settings) -> None:
    """Run until asked to stop, then let running answers finish; those that take too long end with an error."""
    listener, bound = listen_on(settings.listen)
    with use_scratch(scratch_directory(settings)), listener:
        address = settings.advertise or bound
        async with _connections(settings) as ties:
            gateway = build(settings, ties)
            for name, task in gateway.background.items():
                service.spawn(task(), name)
            heart = Heart(
                settings.nats_url,
                lambda: _beat(service, settings.gateway_id, address, gateway.away()),
                interval_s=_beat_s(settings),
            )
            service.spawn(heart.run(), "heart")
            server = _Server(_web_config(gateway.app))
            web = service.spawn(server.serve([listener]), "http")
            service.ready()
            logger.info("serving", extra={"url": f"http://{address}"})
            await service.draining.wait()
            heart.beat_now()
            server.should_exit = True
            await _finish(web, gateway.under_way, settings.drain_s)


async def _finish(web: asyncio.Task[None], under_way: UnderWay, grace_s: float) -> None:
    """Until every answer is over. When the grace time is, or a second signal comes, those that run are told so."""
    try:
        await asyncio.wait([web], timeout=grace_s)
    finally:
        under_way.end()
        await asyncio.wait([web], timeout=LAST_WORDS_S)


@asynccontextmanager
async def _connections(settings: Settings) -> AsyncIterator[Connections]:
    """The ties to bus, store and engines. None of them needs to be there yet."""
    blobs = WatchedBlobs(open_blobs(settings.store_url, credentials=settings.store_credentials))
    tracing = telemetry.setup(
        "gateway",
        settings.otlp_endpoint,
        process_id=settings.gateway_id,
        ratio=settings.trace_ratio,
        delay_ms=settings.trace_delay_ms,
    )
    async with (
        NatsBus(settings.nats_url, name=settings.gateway_id) as bus,
        RedisStore(settings.redis_url) as store,
        Members(bus, kinds=("engine", "lora-server"), interval_s=_beat_s(settings)) as members,
        Channels(token=settings.rpc_token.get_secret_value()) as channels,
    ):
        yield Connections(bus, store, blobs, members, channels, tracing)
    await asyncio.to_thread(tracing.shutdown)


def _beat_s(settings: Settings) -> float:
    return settings.beat_ms / 1000


def _web_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
    )


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers of its own: signals are the service's."""

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield


def _beat(service: Service, gateway_id: str, address: str, away: tuple[str, ...]) -> Beat:
    return Beat(
        kind="gateway",
        id=gateway_id,
        incarnation=service.incarnation,
        seq=0,
        state=service.state,
        address=address,
        away=away,
    )


def main() -> None:
    settings = read(Settings)
    log.setup("gateway", settings.log_level, process_id=settings.gateway_id)
    run("gateway", lambda service: serve(service, settings), drain_s=settings.drain_s + ENDING_S)


if __name__ == "__main__":
    main()
