"""A store that answers, and refuses: an access list that forgot a key, a fact of another shape. Nobody ends for it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
import redis.asyncio

from infinilora.coordinator.leader import Leadership
from infinilora.gateway.accounting import Accounting
from infinilora.gateway.asleep import Asleep
from infinilora.gateway.plan import Target
from infinilora.gateway.reports import Reports
from infinilora.lora_server.commands import Commands
from infinilora.lora_server.report import keep_residency
from infinilora.pool.pool import AdapterPool
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.runtime.fence import Fence
from infinilora.runtime.memory import MemoryBus
from infinilora.runtime.metrics import GatewayMetrics, new_registry
from infinilora.runtime.store import RedisStore
from support.procs import ValkeyServer

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture
async def store(redis_server: ValkeyServer) -> AsyncIterator[RedisStore]:
    """As a user who may do nothing."""
    url = urlsplit(redis_server.url)
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        await client.acl_setuser(
            "nobody", enabled=True, passwords=["+secret"], keys=["*"], commands=["+ping", "+select"]
        )
    async with RedisStore(url._replace(netloc=f"nobody:secret@{url.hostname}:{url.port}").geturl()) as refusing:
        yield refusing


async def test_a_gateway_serves_on(store: RedisStore, caplog: pytest.LogCaptureFixture) -> None:
    bus = MemoryBus()
    reports = Reports(bus, gateway="g", incarnation="i")
    accounting = Accounting(store, bus, GatewayMetrics(new_registry()), reports, half_lives_s=(60,))
    accounting.admitted(Target(requested="a", base=Fingerprint("b"), digest=digest_of(b"a"), tenant="t", name="a"))
    await accounting.flush_heat()
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == ["heat lost"]
    await Asleep(store).look()


async def test_a_coordinator_stands_by(store: RedisStore, caplog: pytest.LogCaptureFixture) -> None:
    leadership = Leadership(store, "c/1", lease_s=3)
    await leadership.step()
    assert (leadership.is_leading, leadership.leader) == (False, None)
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == ["lease unreadable"]


async def test_a_lora_server_keeps_its_pool(store: RedisStore, caplog: pytest.LogCaptureFixture) -> None:
    pool = cast(AdapterPool, SimpleNamespace(resident=list))
    commands = cast(Commands, SimpleNamespace(fence=Fence()))
    with suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await keep_residency(store, "g", pool, commands)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == ["epoch unreadable", "residency refused"]
    assert not commands.fence.is_known
