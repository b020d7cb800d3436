"""The coordinator process: `python -m infinilora.coordinator`."""

import logging
from functools import partial
from typing import Any, get_args

from prometheus_client import CollectorRegistry

from infinilora.coordinator import fleet
from infinilora.coordinator.admin import Admin
from infinilora.coordinator.admin_routes import add_admin
from infinilora.coordinator.ahead import look_ahead
from infinilora.coordinator.app import create_app
from infinilora.coordinator.audit import Audit
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.reconcile import Policy, Reconciler
from infinilora.coordinator.settings import Settings
from infinilora.protocol import subjects
from infinilora.protocol.admin import AdminRequest
from infinilora.protocol.control import Beat, ProcessKind
from infinilora.protocol.ids import Fingerprint
from infinilora.runtime import log, metrics
from infinilora.runtime.bearers import Bearers, parse_keys
from infinilora.runtime.blobs import open_blobs
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.members import EVERYBODY, Heart, Members
from infinilora.runtime.membership import Health
from infinilora.runtime.metrics import CoordinatorMetrics, ProcessMetrics
from infinilora.runtime.service import Service, run
from infinilora.runtime.settings import read
from infinilora.runtime.store import RedisStore
from infinilora.runtime.web import WebServer

logger = logging.getLogger(__name__)


async def serve(service: Service, settings: Settings) -> None:
    """Lead or stand by until asked to stop."""
    interval_s = settings.beat_ms / 1000
    registry = metrics.new_registry()
    async with (
        NatsBus(settings.nats_url, name=settings.coordinator_id) as bus,
        RedisStore(settings.redis_url) as store,
        Members(bus, interval_s=interval_s) as members,
    ):
        owner = f"{settings.coordinator_id}/{service.incarnation}"
        leadership = Leadership(store, owner, lease_s=settings.lease_s)
        reconciler = Reconciler(
            store=store,
            bus=bus,
            members=members,
            leadership=leadership,
            metrics=CoordinatorMetrics(registry),
            policy=_policy(settings),
            blobs=open_blobs(settings.store_url, credentials=settings.store_credentials),
        )
        ahead = look_ahead(
            settings, store=store, bus=bus, members=members, leadership=leadership, reconciler=reconciler
        )
        _watch(registry, bus, members, leadership, reconciler)
        app = create_app(
            fleet=lambda: fleet.show(members, leadership, reconciler, me=settings.coordinator_id),
            away=lambda: _away(bus, reconciler),
            is_ready=lambda: service.is_ready,
            registry=registry,
            scale=ahead.show,
        )
        audit = Audit(store)
        admin = Admin(
            store=store,
            bus=bus,
            leadership=leadership,
            reconciler=reconciler,
            audit=audit,
            models=lambda: _models(reconciler, ahead.show()["desired"]),
            ceilings={"engines": settings.max_engines, "groups": settings.max_groups},
            follows=settings.scaler,
        )
        await bus.serve(subjects.admin(settings.coordinator_id), AdminRequest, admin.obey)
        operators = Bearers(parse_keys(settings.admin_keys.get_secret_value(), "operator"))
        add_admin(app, operators=operators, do=admin.do, read_audit=audit.read)
        with WebServer(app, settings.listen, grace_s=1) as web:
            address = settings.advertise or web.address
            heart = Heart(
                settings.nats_url, lambda: _beat(service, settings.coordinator_id, address), interval_s=interval_s
            )
            leading = service.spawn(leadership.run(), "leadership")
            own = (reconciler.run, reconciler.follow_members, reconciler.follow_adapters, heart.run, web.run)
            for task in (*own, *ahead.tasks):
                service.spawn(task(), task.__qualname__)
            logger.info("serving", extra={"url": f"http://{web.address}"})
            service.spawn(_become_ready(service, bus, reconciler), "readiness")
            await service.draining.wait()
            leading.cancel()
            await leadership.resign()
            await web.stop()


async def _become_ready(service: Service, bus: NatsBus, reconciler: Reconciler) -> None:
    """Ready once broker and store have answered; their later absence is shown, not a reason to leave."""
    await reconciler.looked.wait()
    while not await bus.wait_connected(60.0):
        logger.warning("still waiting for the broker")
    service.ready()


def _away(bus: NatsBus, reconciler: Reconciler) -> list[str]:
    answers = (("nats", bus.is_connected), ("redis", reconciler.store_answers))
    return [name for name, is_there in answers if not is_there]


def _models(reconciler: Reconciler, desired: list[dict[str, Any]]) -> dict[Fingerprint, str]:
    """Served names of the bases that have engines, or had them and are scaled to nothing."""
    served = {m.beat.base: m.beat.model for m in reconciler.engines().values() if m.beat.base and m.beat.model}
    return served | {Fingerprint(one["base"]): one["model"] for one in desired if one["model"]}


def _policy(settings: Settings) -> Policy:
    return Policy(
        reconcile_s=settings.reconcile_s,
        heat_half_lives_s=settings.heat_half_lives_s,
        hot_rps=settings.hot_rps,
        fill=settings.fill,
        max_hints=settings.max_hints,
        hint_pause_s=settings.hint_pause_s,
        move_s=settings.move_s,
        delete_grace_s=settings.delete_grace_s,
        clock_skew_s=settings.clock_skew_s,
    )


def _beat(service: Service, coordinator_id: str, address: str) -> Beat:
    return Beat(
        kind="coordinator",
        id=coordinator_id,
        incarnation=service.incarnation,
        seq=0,
        state=service.state,
        address=address,
    )


def _watch(
    registry: CollectorRegistry, bus: NatsBus, members: Members, leadership: Leadership, reconciler: Reconciler
) -> None:
    """Have the gauges read what they show when they are scraped."""
    ProcessMetrics(registry).watch(
        bus_connected=lambda: bus.is_connected,
        redis_connected=lambda: reconciler.store_answers,
        events_dropped=lambda: bus.dropped_events,
    )
    shown = reconciler.metrics
    shown.leading.set_function(lambda: float(leadership.is_leading))
    shown.epoch.set_function(lambda: float(leadership.epoch))
    shown.frozen.set_function(lambda: float(members.is_frozen))
    for kind in EVERYBODY:
        for health in get_args(Health):
            shown.members.labels(kind=kind, health=health).set_function(partial(_count, members, kind, health))


def _count(members: Members, kind: ProcessKind, health: Health) -> float:
    return float(sum(m.beat.kind == kind and m.health == health for m in members.all()))


def main() -> None:
    settings = read(Settings)
    log.setup("coordinator", settings.log_level, process_id=settings.coordinator_id)
    run("coordinator", lambda service: serve(service, settings), drain_s=settings.drain_s)


if __name__ == "__main__":
    main()
