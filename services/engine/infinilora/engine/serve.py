"""The life of an engine process: load, open every door, say how it goes, drain, stop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from msgspec import structs

from infinilora.engine.assemble import LoadedModel, load_model, make_loop
from infinilora.engine.backends import Around, Bell, OpenLora, open_lora, reach_out
from infinilora.engine.events import Hooks, StepReport
from infinilora.engine.facts import Facts
from infinilora.engine.factsdesk import SERVICE as FACTS_SERVICE
from infinilora.engine.factsdesk import FactsDesk
from infinilora.engine.fit import fitted
from infinilora.engine.job import Patience
from infinilora.engine.loop import EngineLoop
from infinilora.engine.mailboxes import Mailboxes
from infinilora.engine.meter import Meter, StepSpans
from infinilora.engine.options import model_options
from infinilora.engine.publish import keep_publishing
from infinilora.engine.sched.pingpong import PingPong
from infinilora.engine.sched.scheduler import Limits
from infinilora.engine.settings import Settings
from infinilora.engine.shards.choose import number_of_shards
from infinilora.engine.shards.open import Head, head_of
from infinilora.engine.timeline import TimedLora, Timeline
from infinilora.engine.worker import HEALTH_SERVICE, SERVICE, Commands, Engine
from infinilora.pool.device import open_device
from infinilora.protocol import keys, subjects
from infinilora.protocol.control import Beat, Command, EngineLoad
from infinilora.protocol.ids import Digest
from infinilora.runtime import metrics, rpc, telemetry
from infinilora.runtime.capacity import limits_now, tightest
from infinilora.runtime.fence import Fence
from infinilora.runtime.members import Heart
from infinilora.runtime.service import Service
from infinilora.runtime.store import Store
from infinilora.runtime.telemetry import Telemetry
from infinilora.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

EPOCH_AGAIN_S = 1.0


async def serve(settings: Settings, service: Service) -> None:
    """Serve until a stop is asked for; then take nothing new, let what runs finish, and close."""
    torch.set_num_threads(1)  # the native pool has the others
    open_device(settings.device)  # what is not there is said before a model is read
    timeline = Timeline() if settings.timeline else None
    async with AsyncExitStack() as stack:
        num_shards = await asyncio.to_thread(number_of_shards, settings)
        head = stack.enter_context(head_of(settings, num_shards)) if num_shards > 1 else None
        load = load_model if head is None else head.load
        options = replace(model_options(settings, num_shards), timeline=timeline)
        host = tightest(limits_now(settings.memory_bytes))
        options = await asyncio.to_thread(fitted, settings, options, num_shards, host)
        model = await asyncio.to_thread(load, options)
        around = await reach_out(settings, stack)
        if settings.timeline and timeline:
            stack.callback(timeline.write, settings.timeline)
        opening = _engine(settings, service, model, around, timeline=timeline, head=head)
        engine, loop, lora = await stack.enter_async_context(opening)
        token = settings.rpc_token.get_secret_value()
        doors = [(SERVICE, engine), (HEALTH_SERVICE, engine), (FACTS_SERVICE, _facts_desk(settings, model, stack))]
        server = await stack.enter_async_context(rpc.serving(settings.listen, doors, token=token))
        address = settings.advertise or server.address
        heart = Heart(
            settings.nats_url,
            partial(_beat, settings, service, model, around, engine, partial(_load, loop, lora), address),
            interval_s=settings.beat_ms / 1000,
        )
        service.spawn(heart.run(), "heart")
        service.spawn(keep_publishing(around.blobs, model.card, settings.model), "publish")
        service.spawn(around.blobs.ask_while_away(keys.base_card(model.card.fingerprint)), "object store")
        commands = Commands(engine, lora.forget)
        await commands.fence.read(around.store)
        service.spawn(_learn_epoch(commands.fence, around.store), "epoch")
        await around.bus.serve(subjects.commands("engine", settings.engine_id), Command, commands.handle)
        stack.enter_context(_watched(settings, service, loop, engine, heart))
        service.ready()
        heart.beat_now()
        logger.info("engine serves", extra={"address": address, "model": model.card.name, "lora": settings.lora})
        await service.draining.wait()
        engine.stop()
        heart.beat_now()
        await engine.idle.wait()


@contextmanager
def _watched(settings: Settings, service: Service, loop: EngineLoop, engine: Engine, heart: Heart) -> Iterator[None]:
    """While the block lasts, a step that does not end is the end of this process; its sequences go on elsewhere."""
    run_on_loop = asyncio.get_running_loop().call_soon_threadsafe

    def on_stuck() -> None:
        service.stuck()
        heart.beat_now()
        run_on_loop(engine.abandon)

    with Watchdog(settings.step_limit, on_stuck) as watchdog:
        watchdog.watch(loop.name, lambda: loop.progress)
        yield


async def _learn_epoch(fence: Fence, store: Store) -> None:
    """The store may have been away at the start."""
    while not fence.is_known:
        await asyncio.sleep(EPOCH_AGAIN_S)
        await fence.read(store)


def _facts_desk(settings: Settings, model: LoadedModel, stack: AsyncExitStack) -> FactsDesk:
    facts = Facts(model.spec, model.source, model.card.fingerprint)
    desk = FactsDesk(facts, max_bytes=settings.facts_mb << 20, directory=settings.var_dir / "facts")
    stack.callback(desk.close)
    return desk


@asynccontextmanager
async def _engine(
    settings: Settings,
    service: Service,
    model: LoadedModel,
    around: Around,
    *,
    timeline: Timeline | None,
    head: Head | None,
) -> AsyncIterator[tuple[Engine, EngineLoop, OpenLora]]:
    """The step thread and its doors; the thread has stopped when the block has ended."""
    mailboxes, bell = Mailboxes(), Bell()
    traces = telemetry.setup(
        "engine",
        settings.otlp_endpoint,
        process_id=settings.engine_id,
        ratio=settings.trace_ratio,
        delay_ms=settings.trace_delay_ms,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, traces.shutdown)
        registry = stack.enter_context(metrics.scraped(settings.metrics_listen))
        meter = Meter(metrics.EngineMetrics(registry)) if registry else None
        if registry:
            metrics.ObjectStoreMetrics(registry).watch(lambda: around.blobs.answers)
        lora = await stack.enter_async_context(open_lora(settings, model, service, around, bell))
        if head is not None:
            lora = _led(head, lora, service, bell)
        loop = make_loop(
            model,
            lora.backend if timeline is None else TimedLora(lora.backend, timeline),
            _limits(settings),
            max_waiting=settings.max_waiting,
            patience=Patience(settings.loading_patience_s, settings.lost_patience_s),
            hooks=_hooks(mailboxes, _hearers(meter, traces, timeline), service),
            pingpong=PingPong(settings.ping_pong_mode),
        )
        if meter is not None:
            meter.watch(lambda: loop.load)
        bell.connect(loop.wake)
        loop.start()
        stack.push_async_callback(asyncio.to_thread, loop.stop)
        engine = Engine(loop, mailboxes, model.facts, traces)
        yield engine, loop, lora


def _hearers(meter: Meter | None, traces: Telemetry, timeline: Timeline | None) -> list[Callable[[StepReport], None]]:
    """Who hears of every step."""
    spans = StepSpans(traces) if traces.is_on else None
    return [each.step for each in (meter, spans, timeline) if each is not None]


def _hooks(mailboxes: Mailboxes, heard: list[Callable[[StepReport], None]], service: Service) -> Hooks:
    def on_step(report: StepReport) -> None:
        for hear in heard:
            hear(report)

    return Hooks(flush=mailboxes.flush, on_step=on_step, on_crash=service.fail_threadsafe)


def _limits(settings: Settings) -> Limits:
    return Limits(
        settings.max_running,
        settings.step_tokens,
        settings.max_bypass,
        tpot_s=settings.tpot_ms / 1000,
        min_step_tokens=settings.min_step_tokens,
    )


def _led(head: Head, own: OpenLora, service: Service, bell: Bell) -> OpenLora:
    """The back-end of all shards; each lets go of a deleted adapter."""

    def forget(digest: Digest) -> None:
        own.forget(digest)
        head.forget(digest)

    backend = head.lead(own.backend, bell.ring, service.fail_threadsafe)
    return OpenLora(backend, forget, own.load)


def _beat(
    settings: Settings,
    service: Service,
    model: LoadedModel,
    around: Around,
    engine: Engine,
    load: Callable[[], EngineLoad],
    address: str,
) -> Beat:
    """Runs on the heart's thread: reads only."""
    return Beat(
        kind="engine",
        id=settings.engine_id,
        incarnation=service.incarnation,
        seq=0,
        state=service.told(is_draining=engine.is_draining),
        address=address,
        base=model.card.fingerprint,
        model=model.card.name,
        away=around.blobs.away,
        load=load(),
    )


def _load(loop: EngineLoop, lora: OpenLora) -> EngineLoad:
    pool = lora.load()
    if pool is None:
        return loop.load
    return structs.replace(loop.load, resident=pool.resident, loading=pool.loading, failed=pool.failed)
