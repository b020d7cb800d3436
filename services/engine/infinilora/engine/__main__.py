"""`python -m infinilora.engine`: one base-model engine. Settings come from the environment (settings.py)."""

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial

from infinilora.engine.assemble import LoadedModel, ModelOptions, load_model, make_loop
from infinilora.engine.backends import open_lora
from infinilora.engine.loop import EngineLoop, Patience
from infinilora.engine.mailboxes import Mailboxes
from infinilora.engine.publish import keep_publishing
from infinilora.engine.sched.scheduler import Limits
from infinilora.engine.settings import Settings
from infinilora.engine.worker import SERVICE, Commands, Engine
from infinilora.protocol import subjects
from infinilora.protocol.control import Beat, Command
from infinilora.runtime import log, rpc, telemetry
from infinilora.runtime.blobs import open_blobs
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.members import Heart, Members
from infinilora.runtime.service import Service, run
from infinilora.runtime.settings import read

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 0.05


async def serve(settings: Settings, service: Service) -> None:
    """Load, open every door, say that we are ready; on a stop let running sequences finish, then close."""
    model = await asyncio.to_thread(load_model, _model_options(settings))
    async with AsyncExitStack() as stack:
        traces = telemetry.setup(
            "engine",
            settings.otlp_endpoint,
            process_id=settings.engine_id,
            ratio=settings.trace_ratio,
            delay_ms=settings.trace_delay_ms,
        )
        stack.callback(traces.shutdown)
        bus = await stack.enter_async_context(NatsBus(settings.nats_url, name=settings.engine_id))
        members = await stack.enter_async_context(
            Members(bus, kinds=("lora-server",), interval_s=settings.beat_ms / 1000)
        )
        blobs = open_blobs(
            settings.store_url,
            access_key=settings.s3_access_key,
            secret_key=settings.s3_secret_key.get_secret_value(),
        )
        mailboxes = Mailboxes()
        lora = await stack.enter_async_context(
            open_lora(settings, model, service, bus=bus, members=members, blobs=blobs)
        )
        loop = make_loop(
            model,
            lora.backend,
            Limits(settings.max_running, settings.step_tokens, settings.max_bypass),
            max_waiting=settings.max_waiting,
            patience=Patience(settings.loading_patience_s, settings.lost_patience_s),
            flush=mailboxes.flush,
            on_crash=service.fail_threadsafe,
        )
        lora.wake_with(loop.wake)
        loop.start()
        stack.callback(loop.stop)
        engine = Engine(loop, mailboxes, model.facts, traces)
        server = await stack.enter_async_context(
            rpc.serving(settings.listen, [(SERVICE, engine)], token=settings.rpc_token.get_secret_value())
        )
        address = settings.advertise or server.address
        heart = Heart(
            settings.nats_url,
            partial(_beat, settings, service, model, engine, loop, address),
            interval_s=settings.beat_ms / 1000,
        )
        service.spawn(heart.run(), "heart")
        service.spawn(keep_publishing(blobs, model.card, settings.model), "publish")
        await bus.serve(subjects.commands("engine", settings.engine_id), Command, Commands(engine).handle)
        service.ready()
        heart.beat_now()
        logger.info("engine serves", extra={"address": address, "model": model.card.name, "lora": settings.lora})
        await service.draining.wait()
        engine.is_draining = True
        heart.beat_now()
        while engine.num_open:
            await asyncio.sleep(_IDLE_POLL_S)


def _model_options(settings: Settings) -> ModelOptions:
    return ModelOptions(
        directory=settings.model,
        served_name=settings.served_name,
        load_format=settings.load_format,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        kv_bytes=settings.kv_bytes,
        kv_block=settings.kv_block,
        max_model_len=settings.max_model_len,
        max_running=settings.max_running,
    )


def _beat(
    settings: Settings, service: Service, model: LoadedModel, engine: Engine, loop: EngineLoop, address: str
) -> Beat:
    """Runs on the heart's thread: reads only."""
    return Beat(
        kind="engine",
        id=settings.engine_id,
        incarnation=service.incarnation,
        seq=0,
        state="draining" if engine.is_draining else service.state,
        address=address,
        base=model.card.fingerprint,
        model=model.card.name,
        load=loop.load,
    )


def main() -> None:
    settings = read(Settings)
    log.setup("engine", settings.log_level, process_id=settings.engine_id)
    run("engine", partial(serve, settings), drain_s=settings.drain_s)


if __name__ == "__main__":
    main()
