"""Two groups of one base, a server of one thread beside one of two, that beat how fast they are.

What is asked for often is leased of the fast one, what the placement has no place for of the slow one, and rows of a
step go to both. The fast one is told a speed that no machine has, so that nothing depends on what was measured.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from infinilora.engine.backends import groups_of
from infinilora.engine.lora.choose import Group
from infinilora.engine.lora.interface import AdapterRows, StepLost
from infinilora.engine.lora.remote import RemoteLora
from infinilora.protocol.adapter import Site
from infinilora.protocol.shards import ONE
from infinilora.runtime.bus import NatsBus
from infinilora.runtime.members import Members
from support.every_site import (
    CARDS,
    COUNTS,
    Case,
    every_site,
    inputs,
    is_resident,
    is_right,
    living,
    make_case,
    outputs,
    rows_of,
)
from support.lora_groups import LoraGroup, engine_of
from support.procs import NatsServer, ValkeyServer
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

IMPOSSIBLE = 1e15
"""Rows a second."""


class Unlike:
    """The two groups, and what their beats say before anybody has a lease."""

    def __init__(self, work: Path, nats: NatsServer, redis: ValkeyServer) -> None:
        card = CARDS["llama"]
        self.slow = LoraGroup(work, card, ONE, nats, redis, THREADS=1)
        self.fast = LoraGroup(work, card, ONE, nats, redis, THREADS=2, ROWS_PER_S=IMPOSSIBLE)
        self.case = make_case("llama", work, self.slow.blobs)
        self._nats = nats

    async def beats(self) -> dict[str, Group]:
        base, names = self.case.card.fingerprint, {self.slow.name, self.fast.name}
        async with NatsBus(self._nats.url) as bus, Members(bus, kinds=("lora-server",), interval_s=60) as members:

            def heard() -> dict[str, Group]:
                return {g.name: g for g in groups_of(members.alive("lora-server"), base) if g.name in names}

            await eventually(lambda: len(heard()) == len(names), "both beat", timeout_s=90)
            return heard()

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[RemoteLora]:
        """Knows both by their beats; the first two adapters are placed on both, the others nowhere."""
        told = await self.beats()
        async with living() as service, engine_of((self.slow, self.fast), service) as lora:
            lora.update_groups(list(told.values()))
            hot = self.case.adapters[:2]
            lora.place({packed.digest: (self.slow.name, self.fast.name) for packed in hot})
            yield lora


@pytest.fixture
def unlike(tmp_path: Path, nats_server: NatsServer, redis_server: ValkeyServer) -> Iterator[Unlike]:
    groups = Unlike(tmp_path, nats_server, redis_server)
    for group in (groups.slow, groups.fast):
        group.start()
    yield groups
    for group in (groups.slow, groups.fast):
        group.close()


async def test_the_hot_are_leased_of_the_fast_group_the_rest_of_the_slow_and_a_step_has_rows_of_both(
    unlike: Unlike,
) -> None:
    told = await unlike.beats()
    assert told[unlike.fast.name].rows_per_s == IMPOSSIBLE
    assert 0 < told[unlike.slow.name].rows_per_s < IMPOSSIBLE / 4, "measured"
    fast, slow = unlike.fast.name, unlike.slow.name
    async with unlike.engine() as lora:
        seen = await every_site(lora, unlike.case, groups=[fast, fast, slow, slow])
        for (layer, site), y in seen.items():
            is_right(unlike.case, layer, site, y)


async def test_a_group_that_is_killed_costs_its_own_rows_which_the_other_then_serves(unlike: Unlike) -> None:
    case = unlike.case
    async with unlike.engine() as lora:
        rows = await rows_of(lora, case)
        unlike.slow.close()
        await eventually(lambda: unlike.slow.name not in lora.open_links, "its link is gone")
        lost = await lost_by(lora, case, rows)
        assert lost == {packed.digest for packed in case.adapters[2:]}
        for packed in case.adapters[2:]:
            await eventually(partial(is_resident, lora, packed.digest), "the other group has it")
        for packed in case.adapters:
            lora.drop(packed.digest)
        seen = await every_site(lora, case, groups=[unlike.fast.name] * len(COUNTS))
        for (layer, site), y in seen.items():
            is_right(case, layer, site, y)


async def lost_by(lora: RemoteLora, case: Case, rows: list[AdapterRows]) -> frozenset[str]:
    """Whose rows a step of these loses."""
    plan = lora.begin(rows)
    assert plan is not None
    geometry = case.card.geometry()[1, Site.QKV]
    x, _ = inputs(case, Site.QKV, geometry.in_dim)
    ticket = lora.submit(plan, 1, Site.QKV, x)
    try:
        with pytest.raises(StepLost) as lost:
            await asyncio.to_thread(lora.add, ticket, outputs(Site.QKV, geometry.out_dim))
    finally:
        lora.end(plan)
    return frozenset(lost.value.digests)
