"""Puts a gateway together from its connections. The one place that knows how the parts fit."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

from fastapi import FastAPI

from infinilora.gateway.accounting import Accounting
from infinilora.gateway.adapters import Adapters, IngestPlace
from infinilora.gateway.admission import Admission
from infinilora.gateway.app import Deps, Readiness, create_app
from infinilora.gateway.asleep import Asleep
from infinilora.gateway.bases import BaseShelf
from infinilora.gateway.catalog import Catalog
from infinilora.gateway.desk import Desk, Times
from infinilora.gateway.facts import FactsRoad
from infinilora.gateway.fleet import Fleet
from infinilora.gateway.http import Door
from infinilora.gateway.ingest import IngestLimits
from infinilora.gateway.ledger import Ledger
from infinilora.gateway.management import Management, Uploads
from infinilora.gateway.registry import Registry
from infinilora.gateway.relay import Relay
from infinilora.gateway.reports import Advised, Reports
from infinilora.gateway.settings import Settings
from infinilora.gateway.sources import Buckets, Sources
from infinilora.gateway.tenants import Tenants, parse_keys
from infinilora.gateway.underway import UnderWay
from infinilora.gateway.uploads import UploadLimits
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Fingerprint
from infinilora.runtime.blobs import BlobStore, open_blobs
from infinilora.runtime.bus import Bus
from infinilora.runtime.members import Members
from infinilora.runtime.metrics import GatewayMetrics, ObjectStoreMetrics, ProcessMetrics, new_registry
from infinilora.runtime.rpc import Channels
from infinilora.runtime.store import Store
from infinilora.runtime.telemetry import Telemetry
from infinilora.runtime.watched_blobs import WatchedBlobs

logger = logging.getLogger(__name__)

BASES_POLL_S = 0.2
CARDS_POLL_S = 5.0
"""An engine that was started anew with other limits has written another card."""


@dataclass(frozen=True, slots=True)
class Connections:
    """A gateway's ties to the rest of the system, open already."""

    bus: Bus
    store: Store
    blobs: WatchedBlobs
    members: Members
    channels: Channels
    telemetry: Telemetry


@dataclass(frozen=True, slots=True)
class Gateway:
    """A wired gateway: the application to serve, and what must run beside it."""

    app: FastAPI
    fleet: Fleet
    registry: Registry
    admission: Admission
    under_way: UnderWay
    away: Callable[[], tuple[str, ...]]
    """What it needs and does not reach now: `nats`, `redis`, `store`."""
    background: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]


def build(settings: Settings, ties: Connections) -> Gateway:
    """Wire everything. Starts nothing."""
    metrics_registry = new_registry()
    metrics = GatewayMetrics(metrics_registry)
    asleep = Asleep(ties.store)
    fleet = Fleet(
        ties.members.all,
        ties.channels,
        asleep=lambda: asleep.models,
        has_heard_all=lambda: ties.members.has_heard_all,
    )
    registry = Registry(ties.store, ties.bus)
    tenants = Tenants(parse_keys(settings.api_keys.get_secret_value()))
    catalog = Catalog(fleet, registry, settings.aliases, is_open=tenants.is_open)
    shelf = BaseShelf(ties.blobs)
    reports, advised = Reports(ties.bus, gateway=settings.gateway_id, incarnation=uuid4().hex), Advised(ties.bus)
    accounting = Accounting(ties.store, ties.bus, metrics, reports, half_lives_s=settings.heat_half_lives_s)
    admission = Admission(
        max_sequences=settings.max_concurrent_requests,
        max_tenant_sequences=settings.max_tenant_requests,
        advised=advised,
    )
    desk = Desk(
        catalog=catalog,
        shelf=shelf,
        relay=Relay(fleet, on_retry=metrics.retries.inc),
        admission=admission,
        accounting=accounting,
        metrics=metrics,
        telemetry=ties.telemetry,
        times=Times(settings.request_timeout_s, settings.patience_s),
    )
    ProcessMetrics(metrics_registry).watch(
        bus_connected=lambda: ties.bus.is_connected,
        redis_connected=lambda: not registry.is_stale,
        events_dropped=lambda: ties.bus.dropped_events,
    )
    ObjectStoreMetrics(metrics_registry).watch(lambda: ties.blobs.answers)
    away = partial(_away, ties.bus, registry, ties.blobs)
    metrics.registry_age_s.set_function(lambda: registry.age_s)
    metrics.breakers.watch(fleet.breakers)
    deps = Deps(
        door=Door(tenants, metrics),
        desk=desk,
        catalog=catalog,
        management=_management(settings, ties, fleet, registry, catalog, shelf),
        readiness=lambda: _readiness(fleet, shelf, registry, away()),
        metrics=metrics_registry,
        max_body_bytes=settings.max_body_mb << 20,
    )
    background = {
        "registry events": registry.follow_events,
        "registry revisions": registry.follow_revisions,
        "asleep": asleep.follow,
        "heat": accounting.write_heat,
        "reports": reports.send,
        "advice": advised.follow,
        "members": lambda: _follow_members(ties.members, fleet),
        "health": fleet.watch_health,
        "bases": lambda: _read_bases(fleet, shelf),
    }
    return Gateway(create_app(deps), fleet, registry, admission, desk.under_way, away, background)


def _management(
    settings: Settings, ties: Connections, fleet: Fleet, registry: Registry, catalog: Catalog, shelf: BaseShelf
) -> Management:
    upload_bytes = settings.max_upload_mb << 20
    limits = UploadLimits(max_bytes=upload_bytes)
    ledger = Ledger(ties.store, ties.bus, registry)
    adapters = Adapters(
        blobs=ties.blobs,
        ledger=ledger,
        catalog=catalog,
        shelf=shelf,
        ingest=IngestPlace(
            scratch_directory(settings),
            IngestLimits(
                memory_mb=settings.ingest_memory_mb,
                cpu_s=settings.ingest_cpu_s,
                wall_s=settings.ingest_wall_s,
                max_bytes=upload_bytes,
                max_rank=settings.max_rank,
            ),
            settings.max_ingests,
        ),
        ask=FactsRoad(fleet, timeout_s=settings.ingest_wall_s).ask,
        policy=settings.declared_base,
    )
    sources = Sources(settings.roots, _buckets(settings), limits)
    uploads = Uploads(limits, upload_bytes)
    return Management(adapters, ledger, catalog, sources, uploads, is_on=settings.adapter_api == "on")


def scratch_directory(settings: Settings) -> Path:
    return settings.var_dir / "gateway" / settings.gateway_id


def _buckets(settings: Settings) -> Buckets:
    """Buckets of the same server as the store's, with the same credentials."""
    url = urlsplit(settings.store_url)
    if url.scheme != "s3":
        return Buckets((), None)

    def open_bucket(bucket: str) -> BlobStore:
        return open_blobs(urlunsplit(url._replace(netloc=bucket)), credentials=settings.store_credentials)

    return Buckets(settings.buckets or (url.netloc,), open_bucket)


async def _follow_members(members: Members, fleet: Fleet) -> None:
    async for _ in members.changes():
        fleet.note_change()
        await fleet.forget_gone()


async def _read_bases(fleet: Fleet, shelf: BaseShelf) -> None:
    """Read the card and tokenizer of what engines serve before a client asks; an engine may still be storing them."""
    said: dict[Fingerprint, str] = {}
    looked_s = time.monotonic()
    while True:
        is_due = time.monotonic() - looked_s > CARDS_POLL_S
        looked_s = time.monotonic() if is_due else looked_s
        for fingerprint in set(fleet.served().values()):
            try:
                await (shelf.refresh(fingerprint) if is_due else shelf.get(fingerprint))
            except Unavailable as error:
                if said.get(fingerprint) != error.message:
                    said[fingerprint] = error.message
                    logger.warning("base model not read", extra={"base": fingerprint, "reason": error.message})
        await asyncio.sleep(BASES_POLL_S)


def _away(bus: Bus, registry: Registry, blobs: WatchedBlobs) -> tuple[str, ...]:
    bus_and_registry = (("nats", bus.is_connected), ("redis", not registry.is_stale))
    return (*(name for name, answers in bus_and_registry if not answers), *blobs.away)


def _readiness(fleet: Fleet, shelf: BaseShelf, registry: Registry, away: tuple[str, ...]) -> Readiness:
    bases = sorted(name for name, fingerprint in fleet.served().items() if shelf.has(fingerprint))
    is_ready = registry.is_loaded and fleet.is_informed and bool(bases)
    status = ("degraded" if away else "ready") if is_ready else "starting"
    return Readiness(
        is_ready,
        {"status": status, "bases": bases, "adapters": len(registry), "away": list(away)},
    )
