"""A coordinator, and two groups that beat unlike speeds: the hot are planned and staged on the fast one."""

from pathlib import Path

import pytest

from infinilora.protocol import keys
from infinilora.protocol.ids import Digest, Fingerprint, digest_of
from infinilora.runtime.placement import read_placement
from infinilora.runtime.store import RedisStore
from support.clusters import a_cluster
from support.registered import register
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

BASE = Fingerprint(digest_of(b"base"))
HOT = digest_of(b"hot")
RARE = tuple(sorted(digest_of(b"rare%d" % number) for number in range(5)))
HEAT_S = 3600
"""So long a half-life that a test sees no decay."""


async def register_warm(store: RedisStore, name: str, digest: Digest, heat: float) -> None:
    await store.add_heat(keys.heats([HEAT_S]), {digest: heat})
    await register(store, name, digest, BASE)


async def test_the_hot_are_placed_on_the_fast_group_and_the_rare_on_the_slow(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster, RedisStore(cluster.valkey.url) as store:
        cluster.group("a-slow", BASE, rows_per_s=2000.0)
        cluster.group("b-fast", BASE, rows_per_s=8000.0)
        coordinator = await cluster.coordinator("c1", HEAT_HALF_LIVES_S=str(HEAT_S), HOT_RPS="1000")

        async def groups() -> dict[str, list[Digest]]:
            members = (await coordinator.fleet())["members"]
            return {m["id"]: m["load"]["resident"] for m in members if m["kind"] == "lora-server"}

        async def are_known() -> bool:
            return len(await groups()) == 2

        await eventually(are_known, "both beat", 40)
        # The hot one first: what is placed already stays where it is if that is not much worse.
        await register_warm(store, "hot", HOT, 1000.0)
        for number, digest in enumerate(RARE):
            await register_warm(store, f"rare{number}", digest, 10.0)

        async def is_placed() -> bool:
            found = await read_placement(store, BASE)
            return found is not None and found.placement.groups == {"a-slow": RARE, "b-fast": (HOT,)}

        await eventually(is_placed, "the plan heeds what the beats say", 40)

        async def is_there() -> bool:
            return await groups() == {"a-slow-0": list(RARE), "b-fast-0": [HOT]}

        await eventually(is_there, "and it is carried out", 40)
