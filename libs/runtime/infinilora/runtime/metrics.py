"""Every instrument of the system, and the Prometheus page they are read from. The only file that makes one.

A process makes one registry and the groups it needs:

    registry = new_registry()
    metrics = GatewayMetrics(registry)
    metrics.ttft.labels(route="chat", adapter=metrics.adapters.label("tenant/name")).observe(0.2)
    render(registry)

Labels are bounded sets. An adapter's name becomes a label only through `TopNames`; the rest is `other`.
OTel's GenAI names are used where there is one, in Prometheus spelling (dots to underscores, unit at the end).
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from infinilora.protocol.errors import Unavailable
from infinilora.runtime.listening import parse_address

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
BASE = "base"

# OTel's advice for GenAI durations, with finer steps where our targets lie.
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0)
_TPOT_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_STEP_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_SITE_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
_RECOVERY_S = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
_LOAD_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TopNames:
    """The at most `limit` adapter names that may be labels: the hottest, as somebody who knows says."""

    def __init__(self, limit: int = 20) -> None:
        self._limit = limit
        self._names: frozenset[str] = frozenset()

    def set(self, hottest_first: Iterable[str]) -> None:
        self._names = frozenset(name for name, _ in zip(hottest_first, range(self._limit), strict=False))

    def label(self, name: str | None) -> str:
        """The label for a request: its adapter if that is one of the top, `base` for none, else `other`."""
        if name is None:
            return BASE
        return name if name in self._names else OTHER


def new_registry() -> CollectorRegistry:
    return CollectorRegistry(auto_describe=True)


def render(registry: CollectorRegistry) -> bytes:
    """The Prometheus text exposition; serve it as `CONTENT_TYPE`."""
    return generate_latest(registry)


@contextmanager
def scraped(listen: str) -> Iterator[CollectorRegistry | None]:
    """A registry whose scrapes a daemon thread answers at `host:port`, for services without HTTP of their own.

    Raises as `listen_on`. None when `listen` is empty: nothing is measured.
    """
    if not listen:
        yield None
        return
    registry = new_registry()
    host, port = parse_address(listen)
    server: WSGIServer
    thread: threading.Thread
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise Unavailable(f"cannot listen on {listen} for metrics: {error}") from error
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class ProcessMetrics:
    """What every process shows of its ties to the others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bus_connected = Gauge("infinilora_bus_connected", "1 while the broker is connected.", registry=registry)
        self.redis_connected = Gauge("infinilora_redis_connected", "1 while Redis answers.", registry=registry)
        self.events_dropped = Gauge(
            "infinilora_bus_events_dropped", "Events dropped while the broker was away.", registry=registry
        )

    def watch(
        self,
        *,
        bus_connected: Callable[[], bool],
        redis_connected: Callable[[], bool],
        events_dropped: Callable[[], int],
    ) -> None:
        """Read these when scraped."""
        self.bus_connected.set_function(lambda: float(bus_connected()))
        self.events_dropped.set_function(lambda: float(events_dropped()))
        self.redis_connected.set_function(lambda: float(redis_connected()))


class ObjectStoreMetrics:
    """Of every process that reads adapters or writes them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.answers = Gauge(
            "infinilora_object_store_answers", "1 while the object store answers this process.", registry=registry
        )

    def watch(self, answers: Callable[[], bool]) -> None:
        """Read this when scraped."""
        self.answers.set_function(lambda: float(answers()))


class BreakerStates(Collector):
    """The breaker of each engine as it is when somebody reads: an engine that has left leaves the page too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._read: Callable[[], Iterable[tuple[str, bool, int]]] = tuple
        registry.register(self)

    def watch(self, read: Callable[[], Iterable[tuple[str, bool, int]]]) -> None:
        """`read` gives for each engine its id, whether its breaker is open, and how often it has opened."""
        self._read = read

    @override
    def collect(self) -> Iterator[Metric]:
        is_open = GaugeMetricFamily(
            "infinilora_engine_breaker_open",
            "1 while nobody is sent to this engine: it does not answer.",
            labels=["engine"],
        )
        openings = CounterMetricFamily(
            "infinilora_engine_breaker_openings", "Times that this engine stopped answering.", labels=["engine"]
        )
        for engine_id, opened, times in self._read():
            is_open.add_metric([engine_id], float(opened))
            openings.add_metric([engine_id], times)
        yield from (is_open, openings)


class GatewayMetrics:
    """Requests as clients see them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.adapters = TopNames()
        labels = ("route", "adapter")
        self.requests = Counter(
            "infinilora_requests", "Requests ended, by route and code.", ("route", "code"), registry=registry
        )
        self.in_flight = Gauge("infinilora_requests_in_flight", "Requests being served.", registry=registry)
        self.ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Whole request received to first token's bytes written.",
            labels,
            buckets=_TTFT_S,
            registry=registry,
        )
        self.tpot = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "(last - first) / (n - 1).",
            labels,
            buckets=_TPOT_S,
            registry=registry,
        )
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Whole request received to last byte written.",
            labels,
            buckets=_DURATION_S,
            registry=registry,
        )
        self.tokens = Counter(
            "infinilora_tokens", "Tokens of ended requests.", ("direction", "adapter"), registry=registry
        )
        self.retries = Counter("infinilora_engine_retries", "Calls moved to another engine.", registry=registry)
        self.breakers = BreakerStates(registry)
        self.registry_age_s = Gauge(
            "infinilora_registry_age_seconds", "Since the mirror last agreed with the store.", registry=registry
        )


class EngineMetrics:
    """The scheduler and the steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = Gauge("infinilora_engine_running", "Sequences running.", registry=registry)
        self.waiting = Gauge("infinilora_engine_waiting", "Sequences waiting.", registry=registry)
        self.kv_blocks_free = Gauge("infinilora_engine_kv_blocks_free", "KV blocks free.", registry=registry)
        self.step_s = Histogram(
            "infinilora_engine_step_seconds", "One forward pass.", buckets=_STEP_S, registry=registry
        )
        self.step_rows = Counter("infinilora_engine_step_rows", "Rows computed.", ("kind",), registry=registry)
        self.preemptions = Counter("infinilora_engine_preemptions", "Sequences put back.", registry=registry)
        self.prefix_hits = Counter(
            "infinilora_engine_prefix_tokens", "Prompt tokens, by cache outcome.", ("outcome",), registry=registry
        )
        self.steps_lost = Counter(
            "infinilora_engine_steps_lost", "Steps whose rows lost their link.", registry=registry
        )
        self.lora_wait_s = Histogram(
            "infinilora_engine_lora_wait_seconds",
            "Exposed wait: seconds of one step spent waiting for the deltas of a site.",
            ("site",),
            buckets=_SITE_S,
            registry=registry,
        )


class Times(Protocol):
    """What one link counted by itself: calls for each bound and those beyond the last, and all their seconds."""

    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def sum_s(self) -> float: ...


class LinkSeconds(Collector):
    """A histogram that the links keep, native code among them; their counts are added up when somebody reads."""

    def __init__(self, name: str, text: str, bounds_s: Sequence[float], registry: CollectorRegistry) -> None:
        self.bounds_s = tuple(bounds_s)
        self._name, self._text = name, text
        self._live: list[Times] = []
        self._counts, self._sum_s = [0] * (len(bounds_s) + 1), 0.0
        self._lock = threading.Lock()
        registry.register(self)

    def follow(self, times: Times) -> None:
        with self._lock:
            self._live.append(times)

    def end(self, times: Times) -> None:
        """The link is gone and counts no more; what it counted stays."""
        with self._lock:
            self._live.remove(times)
            self._counts, self._sum_s = self._total([times])

    @override
    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            counts, sum_s = self._total(self._live)
        bounds = [*map(str, self.bounds_s), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], list(zip(bounds, accumulate(counts), strict=True)), sum_s)
        yield family

    def _total(self, more: Iterable[Times]) -> tuple[list[int], float]:
        counts, sum_s = self._counts, self._sum_s
        for times in more:
            counts = [a + b for a, b in zip(counts, times.counts, strict=True)]
            sum_s += times.sum_s
        return counts, sum_s


class LoraServerMetrics:
    """The adapter pool and the links it serves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes_free = Gauge("infinilora_pool_bytes_free", "Free bytes of the pool.", registry=registry)
        self.bytes_total = Gauge("infinilora_pool_bytes_total", "Bytes of the pool.", registry=registry)
        self.tier_bytes = Gauge(
            "infinilora_tier_bytes", "Bytes of adapters in the tiers below the pool.", ("tier",), registry=registry
        )
        self.resident = Gauge("infinilora_pool_resident", "Adapters resident.", registry=registry)
        self.leases = Gauge("infinilora_pool_leases", "Leases held.", registry=registry)
        self.waiting = Gauge("infinilora_pool_waiting", "Leases asked for and not granted.", registry=registry)
        self.links = Gauge("infinilora_links_open", "Links open.", registry=registry)
        self.loads = Counter("infinilora_pool_loads", "Adapters staged, by outcome.", ("outcome",), registry=registry)
        self.load_s = Histogram(
            "infinilora_pool_load_seconds",
            "Lease asked for to all layers ready, by where the bytes were.",
            ("tier",),
            buckets=_LOAD_S,
            registry=registry,
        )
        self.evictions = Counter("infinilora_pool_evictions", "Slots given up.", registry=registry)
        self.site_s = LinkSeconds("infinilora_lora_site_seconds", "One site call computed.", _SITE_S, registry)
        self.narrow = Counter(
            "infinilora_lora_narrow_calls",
            "Site calls whose rows came and went as eight-bit integers.",
            registry=registry,
        )
        self.refused = Counter("infinilora_lora_refused", "Site calls refused, by code.", ("code",), registry=registry)


class CoordinatorMetrics:
    """Decisions and what they rest on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leading = Gauge("infinilora_coordinator_leading", "1 while this process leads.", registry=registry)
        self.epoch = Gauge("infinilora_coordinator_epoch", "Newest epoch known here.", registry=registry)
        self.members = Gauge(
            "infinilora_members", "Processes known, by kind and health.", ("kind", "health"), registry=registry
        )
        self.frozen = Gauge("infinilora_coordinator_frozen", "1 while decisions are frozen.", registry=registry)
        self.placements = Counter("infinilora_placements", "Placements written.", registry=registry)
        self.recovery_s = Histogram(
            "infinilora_recovery_seconds",
            "A group's last beat to what was asked for and only there being resident again.",
            buckets=_RECOVERY_S,
            registry=registry,
        )
        self.missed = Gauge(
            "infinilora_recovery_missed",
            "Adapters asked for that died with a group and are resident nowhere.",
            registry=registry,
        )
        self.heat_drift = Gauge(
            "infinilora_heat_drift",
            "Share of the hundred hottest of late and of the long run that are not in both: popularity moves.",
            registry=registry,
        )
        self.commands = Counter(
            "infinilora_commands", "Commands sent, by body and outcome.", ("body", "outcome"), registry=registry
        )
        self.prefetched = Counter(
            "infinilora_prefetched",
            "Adapters staged before anybody asked: used, late (asked for while on their way), unused.",
            ("outcome",),
            registry=registry,
        )
        self.prefetched_there = Gauge(
            "infinilora_prefetched_resident",
            "Adapters staged before anybody asked that are there, and that nobody has asked for yet.",
            registry=registry,
        )
        self.desired = Gauge(
            "infinilora_desired",
            "Engines and groups that there should be, for whoever scales (KEDA, an HPA).",
            ("tier", "model"),
            registry=registry,
        )
        self.attainment = Gauge(
            "infinilora_slo_attainment",
            "Share of the requests of the last five minutes that were within the objective, of the worst base.",
            ("slo_class", "metric"),
            registry=registry,
        )
        self.alerts = Gauge("infinilora_slo_alerts", "Objectives being missed now.", registry=registry)
