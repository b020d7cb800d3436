"""Servers for the tests that want real ones: started once, on first use, gone at the end."""

from collections.abc import Iterator
from typing import TypeVar

import pytest

from support.procs import NatsServer, Server, ValkeyServer, WeedServer

S = TypeVar("S", bound=Server)


def _running(server: S) -> Iterator[S]:
    server.start()
    try:
        yield server
    finally:
        server.kill()  # nothing of it is kept, and SeaweedFS takes its time over a SIGTERM


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Shared: a test that stops or kills a server makes one of its own (`NatsServer(tmp_path)`)."""
    yield from _running(NatsServer(tmp_path_factory.mktemp("nats")))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    yield from _running(ValkeyServer(tmp_path_factory.mktemp("valkey")))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeedServer]:
    yield from _running(WeedServer(tmp_path_factory.mktemp("weed")))
