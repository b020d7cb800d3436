"""Servers for the tests that want real ones: started once, on first use, gone at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.procs import NatsServer, Server, ValkeyServer, WeedServer


def _running(server: Server) -> Iterator[Server]:
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Shared: a test that stops or kills a server makes one of its own (`NatsServer(tmp_path)`)."""
    yield from _running(NatsServer(_home(tmp_path_factory, "nats")))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _running(ValkeyServer(_home(tmp_path_factory, "valkey")))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _running(WeedServer(_home(tmp_path_factory, "weed")))


def _home(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name)
