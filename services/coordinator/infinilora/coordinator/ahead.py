"""Puts together what looks ahead: traffic, scaling, SLO control. The one place that knows how these parts fit."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from infinilora.coordinator.alerts import SloControl
from infinilora.coordinator.kubernetes import Cluster, KubernetesScaler, parse_targets
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.reconcile import Foreseen, Reconciler
from infinilora.coordinator.scale import Bounds
from infinilora.coordinator.scaling import Autoscaler, Backend, Followed, Sizing
from infinilora.coordinator.settings import Settings
from infinilora.coordinator.slo import Alarms, Objective
from infinilora.coordinator.traffic import Watched
from infinilora.protocol.ids import SloClass
from infinilora.runtime.bus import Bus
from infinilora.runtime.members import Members
from infinilora.runtime.store import Store


@dataclass(frozen=True, slots=True)
class Ahead:
    """What must run beside the reconciler, and what of it is shown."""

    tasks: tuple[Callable[[], Coroutine[Any, Any, None]], ...]
    show: Callable[[], dict[str, Any]]


def look_ahead(
    settings: Settings, *, store: Store, bus: Bus, members: Members, leadership: Leadership, reconciler: Reconciler
) -> Ahead:
    """Wire it, and tell the reconciler what is foreseen. Starts nothing."""
    watched, alarms = Watched(bus, members, lead_s=settings.lead_s, season_s=settings.season_s), Alarms()
    if settings.prefetch_mb_s:
        reconciler.foreseen = Foreseen(expected=watched.expected, bytes_per_s=settings.prefetch_mb_s * 1e6)
    scaler = Autoscaler(
        store=store,
        members=members,
        leadership=leadership,
        reconciler=reconciler,
        watched=watched,
        sizing=_sizing(settings),
        backend=_backend(settings),
        alarms=alarms,
    )
    promises = SloControl(
        bus=bus,
        leadership=leadership,
        watched=watched,
        objective=_objective(settings),
        alarms=alarms,
        can_grow=scaler.can_grow,
        metrics=reconciler.metrics,
    )
    return Ahead(
        tasks=(watched.follow, scaler.run, promises.run),
        show=lambda: {**scaler.show(), "slo": promises.show()},
    )


def _objective(settings: Settings) -> Objective:
    first: dict[SloClass, float] = {
        "interactive": settings.slo_ttft_ms / 1000,
        "standard": settings.slo_ttft_standard_ms / 1000,
    }
    return Objective(ttft_s=first, tpot_s=settings.slo_tpot_ms / 1000, target=settings.slo_target)


def _sizing(settings: Settings) -> Sizing:
    rest = settings.scale_hold_s, settings.lead_s
    return Sizing(
        bounds={
            "engines": Bounds(settings.min_engines, settings.max_engines, *rest),
            "groups": Bounds(settings.min_groups, settings.max_groups, *rest),
        },
        engine_sequences=settings.engine_sequences * settings.scale_utilisation,
        group_sequences=settings.group_sequences * settings.scale_utilisation,
        idle_s=settings.scale_idle_s,
        iar=settings.iar,
        fill=settings.fill,
    )


def _backend(settings: Settings) -> Backend | None:
    match settings.scaler:
        case "none":
            return None
        case "local":
            return Followed()
        case "kubernetes":
            where = settings.kube_url.rstrip("/"), settings.kube_namespace
            cluster = Cluster(*where, settings.kube_token_file, settings.kube_ca_file)
            return KubernetesScaler(cluster, parse_targets(settings.kube_targets))
