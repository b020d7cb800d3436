"""Links between two processes: every interleaving that a seed can make, and ends that are killed."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinilora.link import shm
from infinilora.link.engine_end import EngineEnd
from infinilora.link.errors import LinkClosed, LinkTimeout
from infinilora.link.frame import PlanSegment
from infinilora.link.layout import attach_ring_file
from infinilora.link.open import LinkSettings, attach
from infinilora.link.ports import Ticket

PEER = Path(__file__).parents[2] / "support" / "link_peer.py"
DEADLINE_S = 20.0


@dataclass
class Peer:
    """The other process and our end of the link to it."""

    end: EngineEnd
    process: "subprocess.Popen[str]"

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(DEADLINE_S) == -signal.SIGKILL


@contextmanager
def peer(
    kind: str, directory: Path, *, seed: int = 0, pauses: bool = False, num_buffers: int = 4, buffer_bytes: int = 4096
) -> Iterator[Peer]:
    engine_is, server_is = ("tcp", "tcp") if kind == "tcp" else kind.split("-")
    path = directory / f"ring-{seed}"
    buffers = {"num_buffers": num_buffers, "buffer_bytes": buffer_bytes}
    settings = {"backend": server_is, "path": str(path), "seed": seed, "pauses": pauses, "buffers": buffers}
    with subprocess.Popen(
        [sys.executable, str(PEER), json.dumps(settings)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            secret = bytes.fromhex(said["secret"])
            if kind == "tcp":
                end = attach(said["chosen"], secret, LinkSettings(directory=None))
            else:
                end = shm.engine_end(attach_ring_file(path, secret), is_native=engine_is == "native")
            yield Peer(end, process)
            end.close()
            if process.returncode is None:
                assert process.wait(DEADLINE_S) == 0
                assert json.loads(process.stdout.readline()) == {"closed": True}
        finally:
            process.kill()


class Traffic:
    """Random steps over one link: several calls at once, waited for in any order or abandoned. Counts chunks."""

    def __init__(self, end: EngineEnd, seed: int) -> None:
        self.end = end
        self.rng = random.Random(seed)
        self.source = torch.randn(400, 96, generator=torch.Generator().manual_seed(seed))
        self.chunks = 0
        self.step = 0

    def run(self, messages: int) -> None:
        while self.chunks < messages:
            self.step += 1
            self.end.send_plan(self.step, [PlanSegment(0, 1, 2, 3)] * self.rng.randrange(4))
            calls = [self._submit() for _ in range(self.rng.randrange(1, 5))]
            self.rng.shuffle(calls)
            for ticket, x, layer in calls[self.rng.choice((0, 0, 0, 1)) :]:
                self._wait(ticket, x, layer)
            self.end.abandon()

    def _submit(self) -> tuple[Ticket, Tensor, float]:
        rows, cols = self.rng.choice((1, 7, 40, 390, 390)), self.rng.choice((8, 31, 64, 64))
        at, left, layer = self.rng.randrange(10), self.rng.randrange(30), self.rng.randrange(50)
        x = self.source[at : at + rows, left : left + cols]
        if self.rng.random() < 0.5:
            x = x.contiguous()
        ids = weights = None
        if self.rng.random() < 0.2:
            ids = torch.full((rows, 2), self.rng.randrange(9), dtype=torch.int32)
            weights = torch.full((rows, 2), 0.25) if self.rng.random() < 0.5 else None
        ticket = self.end.submit(self.step, layer, 0, x, cols, topk_ids=ids, topk_weights=weights)
        self.chunks += ticket.chunks
        moved = layer + (0 if ids is None else 2 * int(ids[0, 0])) + (0 if weights is None else 0.5)
        return ticket, x, moved

    def _wait(self, ticket: Ticket, x: Tensor, moved: float) -> None:
        wide = torch.zeros(x.shape[0], x.shape[1] + self.rng.randrange(3))
        out = wide[:, : x.shape[1]]
        self.end.wait(ticket, out, deadline_s=DEADLINE_S, add=self.rng.random() < 0.5)
        torch.testing.assert_close(out, x + moved)


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("native-native", 200_000),
        ("native-python", 5_000),
        ("python-native", 5_000),
        ("python-python", 5_000),
        ("tcp", 20_000),
    ],
)
@pytest.mark.timeout(180)
def test_random_traffic_is_right_and_leaves_nothing_behind(kind: str, messages: int, tmp_path: Path) -> None:
    with peer(kind, tmp_path, seed=7, pauses=True) as other:
        traffic = Traffic(other.end, seed=7)
        traffic.run(messages)
        _finish(other.end, traffic)
        assert other.end.stale > 0, "some answers came too late, as intended"


def _finish(end: EngineEnd, traffic: Traffic) -> None:
    traffic.run(traffic.chunks + 1)
    deadline = time.monotonic() + DEADLINE_S
    while end.in_flight and time.monotonic() < deadline:
        end.send_plan(traffic.step + 1, [])
        end.wait(end.submit(traffic.step + 1, 0, 0, traffic.source[:1], 96), torch.zeros(1, 96), deadline_s=5, add=True)
    assert (end.in_flight, end.num_outstanding) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_ring_never_stands_still(seed: int, tmp_path: Path) -> None:
    """One buffer each way: every chunk waits for the one before it."""
    with peer("native-native", tmp_path, seed=seed, num_buffers=1, buffer_bytes=1024) as other:
        Traffic(other.end, seed).run(500)


@pytest.mark.parametrize("kind", ["native-native", "tcp"])
def test_a_killed_server_is_a_timeout_or_a_closed_link_never_a_delta(kind: str, tmp_path: Path) -> None:
    with peer(kind, tmp_path) as other:
        x, out = torch.randn(4, 8), torch.zeros(4, 8)
        other.end.send_plan(1, [])
        other.end.wait(other.end.submit(1, 1, 0, x, 8), out, deadline_s=DEADLINE_S, add=False)
        torch.testing.assert_close(out, x + 1)
        other.kill()
        other.end.send_plan(2, [])
        ticket = other.end.submit(2, 1, 0, x, 8)
        with pytest.raises(LinkTimeout if kind == "native-native" else LinkClosed):
            other.end.wait(ticket, out, deadline_s=0.2, add=True)
        torch.testing.assert_close(out, x + 1)
        other.end.quarantine()
        assert not list(tmp_path.iterdir()), "a killed server leaves no link file"


def test_a_stopped_server_is_quarantined_and_a_new_pair_works(tmp_path: Path) -> None:
    """What the old server writes after it wakes reaches nobody."""
    x = torch.randn(4, 8)
    with peer("native-native", tmp_path, seed=1) as stopped:
        out = torch.zeros(4, 8)
        stopped.end.send_plan(1, [])
        stopped.process.send_signal(signal.SIGSTOP)
        ticket = stopped.end.submit(1, 1, 0, x, 8)
        with pytest.raises(LinkTimeout):
            stopped.end.wait(ticket, out, deadline_s=0.2, add=True)
        stopped.end.quarantine()
        with peer("native-native", tmp_path, seed=2) as fresh:
            fresh.end.send_plan(1, [])
            fresh.end.wait(fresh.end.submit(1, 2, 0, x, 8), out, deadline_s=DEADLINE_S, add=True)
            stopped.process.send_signal(signal.SIGCONT)
            torch.testing.assert_close(out, x + 2)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kind", "messages"), [("native-native", 10_000_000), ("tcp", 500_000)])
def test_random_traffic_for_hours(kind: str, messages: int, tmp_path: Path) -> None:
    for seed in range(10):
        with peer(kind, tmp_path, seed=seed, pauses=True, num_buffers=1 + seed) as other:
            traffic = Traffic(other.end, seed)
            traffic.run(messages // 10)
            _finish(other.end, traffic)
