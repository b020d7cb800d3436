"""The coordinator's HTTP, in process."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from infinilora.coordinator.admin_routes import add_admin
from infinilora.coordinator.app import create_app
from infinilora.coordinator.audit import Numbered
from infinilora.coordinator.fleet import show_member
from infinilora.protocol.admin import AdminReply, AdminRequest, AuditEntry, Freeze, PinAdapter
from infinilora.protocol.control import Beat, GroupLoad
from infinilora.protocol.ids import digest_of
from infinilora.runtime import metrics
from infinilora.runtime.bearers import Bearers
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
    told = {"bytes_free": 1, "bytes_total": 2, "leases": 3, "resident": (digest_of(b"a"),), "shape": "1x1"}
    assert shown["load"] == told | {"loading": (), "failed": (), "pinned": (), "rows_per_s": 0.0}


class Leader:
    """Takes acts as a leader would, and keeps them."""

    def __init__(self) -> None:
        self.asked: list[AdminRequest] = []

    async def do(self, request: AdminRequest) -> AdminReply:
        self.asked.append(request)
        return AdminReply(result={"changed": True})

    async def audit(self, limit: int, before: int | None) -> list[Numbered]:
        entry = AuditEntry(entry_id="i", at="t", who="ann", epoch=3, act=Freeze(), reason="r")
        return [Numbered(n, entry) for n in (9, 8, 7) if before is None or n < before][:limit]


def operated_by(keys: dict[str, str]) -> tuple[Leader, httpx.AsyncClient]:
    leader, app = Leader(), FastAPI()
    add_admin(app, operators=Bearers(keys), do=leader.do, read_audit=leader.audit)
    headers = {"authorization": "Bearer secret"}
    return leader, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)


async def test_an_act_has_the_name_of_whose_key_was_shown() -> None:
    leader, client = operated_by({"secret": "ann", "other": "bob"})
    answer = await client.post("/v1/admin/pin", json={"adapter": "one", "reason": "because"})
    assert (answer.status_code, answer.json()) == (200, {"changed": True})
    assert leader.asked == [AdminRequest(act=PinAdapter("one"), who="ann", reason="because")]
    await client.post("/v1/admin/freeze", headers={"authorization": "Bearer other"})
    assert leader.asked[-1] == AdminRequest(act=Freeze(), who="bob")


@pytest.mark.parametrize("shown", ["", "Bearer wrong", "secret"])
async def test_without_an_operators_key_nothing_is_done_or_shown(shown: str) -> None:
    leader, client = operated_by({"secret": "ann"})
    for method, path in (("POST", "/v1/admin/freeze"), ("GET", "/v1/admin/audit")):
        answer = await client.request(method, path, headers={"authorization": shown})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert leader.asked == []


async def test_without_keys_the_admin_api_is_off() -> None:
    leader, client = operated_by({})
    answer = await client.post("/v1/admin/freeze")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "feature_off")
    assert leader.asked == []


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("fly", "{}", 400, "wanted one of drain, evict, freeze, pin, rebalance, scale"),
        ("pin", "{}", 400, "adapter"),
        ("pin", '{"adapter": 5}', 400, "adapter"),
        ("pin", '{"adapter": "a", "pined": true}', 400, "pined"),
        ("pin", "[]", 400, "object"),
        ("pin", "not json", 400, "cannot be read"),
        ("freeze", '{"reason": 1}', 400, "str"),
        ("freeze", '{"reason": "' + "x" * 501 + '"}', 400, "501 letters"),
        ("freeze", " " * 20_000, 413, "16384"),
    ],
)
async def test_bodies_that_mean_nothing_are_refused(path: str, body: str, status: int, words: str) -> None:
    leader, client = operated_by({"secret": "ann"})
    answer = await client.post(f"/v1/admin/{path}", content=body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    assert leader.asked == []


async def test_the_audit_is_read_in_pages() -> None:
    _, client = operated_by({"secret": "ann"})
    entries = (await client.get("/v1/admin/audit?limit=1&before=9")).json()["entries"]
    act = {"act": "freeze", "frozen": True}
    wanted = {"number": 8, "entry_id": "i", "at": "t", "who": "ann", "epoch": 3, "act": act, "reason": "r"}
    assert entries == [wanted]
    assert (await client.get("/v1/admin/audit?limit=many")).status_code == 400
