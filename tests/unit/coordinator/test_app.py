"""The coordinator's HTTP, in process."""

from typing import Any

import httpx
import pytest

from infinilora.coordinator.app import create_app
from infinilora.coordinator.fleet import show_member
from infinilora.protocol.control import Beat, GroupLoad
from infinilora.protocol.ids import digest_of
from infinilora.runtime import metrics
from infinilora.runtime.membership import Member


class State:
    def __init__(self) -> None:
        self.fleet: dict[str, Any] = {"leader": "c1", "members": []}
        self.away: list[str] = []
        self.is_ready = True


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def client(state: State) -> httpx.AsyncClient:
    registry = metrics.new_registry()
    metrics.CoordinatorMetrics(registry)
    app = create_app(
        fleet=lambda: state.fleet, away=lambda: state.away, is_ready=lambda: state.is_ready, registry=registry
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_alive_is_alive_whatever_is_away(client: httpx.AsyncClient, state: State) -> None:
    state.away, state.is_ready = ["nats", "redis"], False
    assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("is_ready", "away", "status", "word"),
    [
        (False, ["nats"], 503, "starting"),
        (True, [], 200, "ready"),
        (True, ["redis"], 200, "degraded"),
    ],
)
async def test_readiness_says_what_is_away(
    client: httpx.AsyncClient, state: State, is_ready: bool, away: list[str], status: int, word: str
) -> None:
    state.is_ready, state.away = is_ready, away
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()) == (status, {"status": word, "away": away})


async def test_the_fleet_is_json_and_the_metrics_are_prometheus(client: httpx.AsyncClient, state: State) -> None:
    assert (await client.get("/v1/fleet")).json() == state.fleet
    page = await client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "infinilora_coordinator_leading 0.0" in page.text


def test_a_member_is_shown_with_its_load_and_health() -> None:
    load = GroupLoad(bytes_free=1, bytes_total=2, leases=3, resident=(digest_of(b"a"),))
    beat = Beat(kind="lora-server", id="l0", incarnation="x", seq=9, state="ready", address="h:1", group="g", load=load)
    shown = show_member(Member(beat, 1.0, "suspect"))
    assert (shown["kind"], shown["id"], shown["state"], shown["health"]) == ("lora-server", "l0", "ready", "suspect")
    resident = (digest_of(b"a"),)
    assert shown["load"] == {"bytes_free": 1, "bytes_total": 2, "leases": 3, "resident": resident, "shape": "1x1"}
