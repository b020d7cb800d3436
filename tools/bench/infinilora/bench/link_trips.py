"""Round trips over a link between this process and one that it forks: what a site call costs beyond its product.

A prepared call is sent, the server computes the delta of the smallest adapter there is (rank one: it reads all of x
and writes all of the answer), and the wait puts the answer into y. Both ends poll for long enough to stay awake.
"""

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from infinilora.kernels.batch import Part, segment_table
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.engine_end import EngineEnd
from infinilora.link.errors import LinkClosed
from infinilora.link.frame import Header, Kind, PlanSegment
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from infinilora.link.server_end import ServerEnd
from infinilora.link.times import SiteTimes
from infinilora.protocol.errors import Internal

COLS = 1024
STEP, SITE = 1, 0
WARM_UP = 300
AWAKE_S = 0.005
CORES = sorted(os.sched_getaffinity(0))
"""Before anything is pinned: a forked end inherits where its parent was put."""


@dataclass(frozen=True, slots=True)
class Trips:
    """Round trips of one size: microseconds, and bytes moved (both ways) in a second."""

    num_bytes: int
    median_us: float
    p99_us: float
    n: int
    floor_us: float

    @property
    def gb_s(self) -> float:
        return 2 * self.num_bytes / self.median_us / 1e3

    @property
    def over_floor(self) -> float:
        """Of memcpy bandwidth."""
        return self.floor_us / self.median_us


def serve(end: ServerEnd) -> None:
    """Answer every call until the engine closes: column 0 of x in every column, by an adapter of rank one."""
    kernels = SlotKernels(num_slots=1, num_layers=1)
    a = torch.zeros(1, COLS)
    a[0, 0] = 1.0
    kernels.bind(0, 0, SITE, (Part(a=a, bt=torch.ones(1, COLS), scale=1.0, out_offset=0),), COLS, COLS)
    rows = segment_table([(0, 1 << 20, 0)])
    native = kernels.native_step()
    if native is not None and end.use(native, SiteTimes(())):
        native.shut(1)
        native.load(STEP, rows, ready_layers=1, version=1)
    try:
        while True:
            call = end.recv(5.0)
            if call is not None and call.x is not None:
                whole = segment_table([(0, call.header.rows, 0)])
                kernels.dense(0, SITE, whole, call.x, end.reply_buffer(call), accumulate=False)
                end.reply(call)
    except LinkClosed:
        return


@contextmanager
def linked(backend: str, directory: Path, *, spin_s: float = AWAKE_S, core: int = -1) -> Iterator[EngineEnd]:
    """An engine's end here; the server's in a forked process on a core of its own. `tcp_i8`: tcp with narrow rows."""
    settings = LinkSettings(
        directory=directory if backend == "shm" else None,
        spin_s=spin_s,
        narrowing="always" if backend == "tcp_i8" else "never",
    )
    offers = Offers(settings)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        pin(core)
        torch.set_num_threads(1)
        opening = Opener(settings).choose(offers.wire)
        os.write(write, json.dumps([opening.chosen, opening.secret.hex()]).encode())
        serve(opening.wait(10))
        os._exit(0)
    chosen, secret = json.loads(os.read(read, 4096))
    offers.close()
    end = attach(chosen, bytes.fromhex(secret), settings)
    try:
        yield end
    finally:
        end.close()
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def pin(core: int) -> None:
    """Keep this process on one core: a round trip is not to wait for the other end to be moved."""
    os.sched_setaffinity(0, {CORES[core]})


def round_trips(end: EngineEnd, num_bytes: int, n: int, *, memcpy: float, rest_s: float = 0.0) -> Trips:
    """`memcpy`: GB/s of this size. Before each trip both ends have `rest_s` to fall asleep."""
    x = torch.randn(num_bytes // 4 // COLS, COLS)
    y = torch.zeros_like(x)
    times = []
    end.send_plan(STEP, [PlanSegment(0, x.shape[0], 0, 1)])
    ticket = end.prepare(Header(kind=Kind.SITE, site=SITE, rows=x.shape[0], in_cols=COLS, out_cols=COLS))
    for _ in range(WARM_UP + n):
        if rest_s:
            time.sleep(rest_s)
        started = time.perf_counter()
        end.send(ticket, STEP, 0, x)
        end.wait(ticket, y, deadline_s=5.0, add=False)
        times.append(time.perf_counter() - started)
    error, allowed = (x[:, :1] - y).abs().amax(1), x.abs().amax(1) / 254 * (end.narrowing != "never")
    if (error > 1.001 * allowed).any():
        raise Internal(f"a delta came back wrong by {error.max():.3g}")
    kept = sorted(times[WARM_UP:])
    median_us, p99_us = 1e6 * statistics.median(kept), 1e6 * kept[len(kept) * 99 // 100]
    return Trips(num_bytes, median_us, p99_us, n, 2 * num_bytes / memcpy / 1e3)


def memcpy_gb_s(num_bytes: int, tries: int = 200) -> float:
    source, target = torch.randn(num_bytes // 4), torch.empty(num_bytes // 4)
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return num_bytes / statistics.median(times) / 1e9
