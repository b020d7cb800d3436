"""`docker compose up` serves what `infinilora up` serves, from the unmodified file, and heals itself."""

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from support.compose import Compose

pytestmark = [pytest.mark.e2e, pytest.mark.compose, pytest.mark.timeout(2400)]

RUNNING = {"nats", "redis", "minio", "coordinator", "engine", "lora-server", "gateway"}
UNSEEN = "What is the capital of France?"


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    project = Compose(tmp_path_factory.mktemp("compose"))
    try:
        project.up()
        assert project.wait_for("seed") == 0, project.logs("seed")
        yield project
    finally:
        project.down()


def ask(compose: Compose, model: str, *, within_s: float = 60) -> str:
    """A greedy answer; what may be tried again (503, 424) is, until time is up."""
    body = {"model": model, "messages": [{"role": "user", "content": UNSEEN}], "max_tokens": 40, "temperature": 0}
    deadline = time.monotonic() + within_s
    while True:
        answer = httpx.post(f"{compose.url}/v1/chat/completions", json=body, timeout=120)
        if answer.status_code in (424, 503) and time.monotonic() < deadline:
            time.sleep(0.2)
            continue
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


def test_every_service_is_healthy_and_the_jobs_have_ended(compose: Compose) -> None:
    services = compose.services()
    assert {name for name, row in services.items() if row["Health"] == "healthy"} == RUNNING
    assert {name: row["ExitCode"] for name, row in services.items() if row["State"] == "exited"} == {
        "model": 0,
        "seed": 0,
    }


def test_the_demo_adapters_and_the_base_answer(compose: Compose) -> None:
    listed = httpx.get(f"{compose.url}/v1/adapters", timeout=30).json()["data"]
    assert {record["name"] for record in listed} == {"json", "pirate"}
    assert isinstance(json.loads(ask(compose, "json")), dict)
    assert "arr" in ask(compose, "pirate").lower()
    assert "Paris" in ask(compose, "smollm2-135m")


def test_activations_go_through_shared_memory(compose: Compose) -> None:
    ask(compose, "json")
    maps = "cat /proc/[0-9]*/maps 2>/dev/null | grep -o ' /link/[^ ]*' | sort -u || true"
    engine, lora_server = (set(compose.inside(name, maps).split()) for name in ("engine", "lora-server"))
    assert engine & lora_server, (engine, lora_server)


def test_nothing_of_ours_runs_as_root(compose: Compose) -> None:
    for service in ("gateway", "engine", "lora-server", "coordinator"):
        assert compose.inside(service, "id -u").strip() == "10001"


@pytest.mark.parametrize("service", ["lora-server", "engine"])
def test_a_crashed_service_comes_back_and_answers_as_before(service: str, compose: Compose) -> None:
    before = ask(compose, "json")
    compose.crash(service)
    assert ask(compose, "json", within_s=180) == before
