"""Instruments are bounded, per registry, and readable by Prometheus."""

import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infinilora.protocol.errors import Unavailable
from infinilora.runtime import metrics
from support.ipv6 import needs_ipv6
from support.procs import free_port


def names(page: bytes) -> set[str]:
    return {family.name for family in text_string_to_metric_families(page.decode())}


@pytest.mark.parametrize(
    "group",
    [
        metrics.ProcessMetrics,
        metrics.ObjectStoreMetrics,
        metrics.GatewayMetrics,
        metrics.EngineMetrics,
        metrics.LoraServerMetrics,
        metrics.CoordinatorMetrics,
    ],
)
def test_two_processes_of_one_kind_can_live_in_one(group: type[metrics.EngineMetrics]) -> None:
    first, second = metrics.new_registry(), metrics.new_registry()
    group(first)
    group(second)
    assert names(metrics.render(first)) == names(metrics.render(second)) != set()


def test_the_names_that_others_rely_on_are_there() -> None:
    registry = metrics.new_registry()
    metrics.GatewayMetrics(registry)
    assert {
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_server_request_duration_seconds",
        "infinilora_requests",
    } <= names(metrics.render(registry))


def test_every_instrument_is_written_by_somebody() -> None:
    rooms = [Path(__file__).parents[3] / place for place in ("services", "libs")]
    source = "".join(p.read_text() for room in rooms for p in room.rglob("*.py"))
    groups = (metrics.GatewayMetrics, metrics.EngineMetrics, metrics.LoraServerMetrics, metrics.CoordinatorMetrics)
    for group in groups:
        for name in vars(group(metrics.new_registry())):
            assert len(re.findall(rf"\.{name}\b", source)) > 1, f"{group.__name__}.{name} is made and never written"


def test_only_the_top_names_become_labels() -> None:
    top = metrics.TopNames(limit=2)
    assert top.label("t/a") == "other"
    top.set(["t/a", "t/b", "t/c"])
    assert [top.label(name) for name in ("t/a", "t/b", "t/c", None)] == ["t/a", "t/b", "other", "base"]


def test_ties_are_read_when_scraped() -> None:
    registry = metrics.new_registry()
    state = {"connected": True}
    metrics.ProcessMetrics(registry).watch(
        bus_connected=lambda: state["connected"], redis_connected=lambda: True, events_dropped=lambda: 3
    )
    assert b"infinilora_bus_connected 1.0" in metrics.render(registry)
    state["connected"] = False
    page = metrics.render(registry)
    assert b"infinilora_bus_connected 0.0" in page
    assert b"infinilora_bus_events_dropped 3.0" in page


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=needs_ipv6)])
def test_a_service_without_http_is_scraped_from_a_thread(host: str) -> None:
    port = free_port()
    with metrics.scraped(f"{host}:{port}") as registry:
        assert registry is not None
        metrics.EngineMetrics(registry).running.set(4)
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as answer:
            assert b"infinilora_engine_running 4.0" in answer.read()
        with pytest.raises(Unavailable, match="for metrics"), metrics.scraped(f"{host}:{port}"):
            pass
    with metrics.scraped("") as nothing:
        assert nothing is None


def test_a_breaker_is_on_the_page_for_as_long_as_its_engine_is_known() -> None:
    registry = metrics.new_registry()
    known = [("e-0", True, 3), ("e-1", False, 0)]
    metrics.GatewayMetrics(registry).breakers.watch(lambda: known)
    page = metrics.render(registry).decode()
    assert 'infinilora_engine_breaker_open{engine="e-0"} 1.0' in page
    assert 'infinilora_engine_breaker_open{engine="e-1"} 0.0' in page
    assert 'infinilora_engine_breaker_openings_total{engine="e-0"} 3.0' in page
    known.pop(0)
    assert "e-0" not in metrics.render(registry).decode()
