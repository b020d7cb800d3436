"""Operators' commands against real coordinators: asked at the one that stands by, done by the leader, and kept."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinilora.cli.terminal import REFUSED
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.runtime.placement import read_placement
from infinilora.runtime.store import RedisStore
from support.clusters import Coordinator, a_cluster
from support.registered import register
from support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

BASE = Fingerprint(digest_of(b"base"))
ADAPTER = digest_of(b"adapter")
KEYS = {"ADMIN_KEYS": "k1:ann,k2:bob"}


class Operator:
    """`infinilora` with somebody's key, at one coordinator."""

    def __init__(self, at: Coordinator, key: str, home: Path) -> None:
        self._options = ["--coordinator", f"http://127.0.0.1:{at.port}", "--admin-key", key, "--var-dir", str(home)]

    async def __call__(self, *arguments: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "infinilora.cli", *arguments, *self._options]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout


async def test_any_coordinator_takes_them_and_the_audit_outlives_the_leader(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster, RedisStore(cluster.valkey.url) as store:
        first = await cluster.coordinator("c1", **KEYS)
        await eventually(first.leads, "the first leads", 20)
        second = await cluster.coordinator("c2", **KEYS)
        cluster.group("g1", BASE)
        cluster.group("g2", BASE)
        await register(store, "one", ADAPTER, BASE)
        ann, bob = Operator(second, "k1", tmp_path), Operator(second, "k2", tmp_path)

        async def groups() -> dict[str, Any]:
            found = await read_placement(store, BASE)
            return dict(found.placement.groups) if found else {}

        async def resident() -> set[str]:
            members = (await second.fleet())["members"]
            return {m["group"] for m in members if m["kind"] == "lora-server" and ADAPTER in m["load"]["resident"]}

        async def placed_once() -> bool:
            return sorted(map(len, (await groups()).values())) == [0, 1]

        await eventually(placed_once, "the adapter is on one of two groups", 20)
        (at,) = [group for group, held in (await groups()).items() if held]
        rows = [line.split()[:4] for line in (await ann("rebalance", "--dry-run")).splitlines()]
        assert ["default/one", "kept", at, at] in rows, "what stays is in the plan too"
        assert "pinned" in await ann("pin", "one", "--reason", "a launch")

        async def is_staged() -> bool:
            return len(await resident()) == 1

        await eventually(is_staged, "what is pinned is staged", 20)
        (home,) = await resident()
        other = "g1" if home == "g2" else "g2"
        assert f"{home}: {ADAPTER} taken" in await bob("evict", "one")

        await ann("freeze")
        assert "conflict" in await bob("rebalance", status=REFUSED)
        await bob("drain", home)
        dry = json.loads(await bob("rebalance", "--dry-run", "--json"))
        (move,) = dry["bases"][0]["moves"]
        assert (move["name"], move["reason"], move["before"], move["after"]) == (
            "default/one", "moved", [home], [other],
        )  # fmt: skip
        assert ["default/one", "moved", home, other] in [
            line.split()[:4] for line in (await bob("rebalance", "--dry-run")).splitlines()
        ]
        assert (await groups())[home] == (ADAPTER,)
        first.kill()
        await eventually(second.leads, "the second leads", 20)
        fleet = await second.fleet()
        assert (fleet["frozen_by"]["who"], fleet["drains"]) == ("ann", [home])
        await ann("unfreeze")

        async def is_drained() -> bool:
            states = {m["group"]: m["state"] for m in (await second.fleet())["members"] if m["group"]}
            return states[home] == "draining" and other in await resident()

        await eventually(is_drained, "the group is emptied, then drained", 30)
        await bob("undrain", home)
        entries = json.loads(await ann("audit", "--json"))
        told = [(e["number"], e["who"], e["epoch"], e["act"]["act"], e["reason"]) for e in reversed(entries)]
        assert told == [
            (1, "ann", 1, "pin", "a launch"),
            (2, "bob", 1, "evict", ""),
            (3, "ann", 1, "freeze", ""),
            (4, "bob", 1, "drain", ""),
            (5, "ann", 2, "freeze", ""),
            (6, "bob", 2, "drain", ""),
        ]


async def test_a_wrong_key_and_a_system_without_keys_refuse(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        with_keys = await cluster.coordinator("c1", **KEYS)
        without = await cluster.coordinator("c2")
        await eventually(with_keys.leads, "the first leads", 20)
        assert "invalid_api_key" in await Operator(with_keys, "k3", tmp_path)("freeze", status=REFUSED)
        assert "feature_off" in await Operator(without, "k1", tmp_path)("freeze", status=REFUSED)
        assert (await with_keys.fleet())["frozen_by"] is None
