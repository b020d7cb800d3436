"""make bench-link: round trips over the link between two processes, and its bandwidth beside memcpy.

A round trip is what a site call costs beyond its product, as engine and LoRA server make it: a prepared call is sent,
the server computes the delta of the smallest adapter there is (rank one: it reads all of x and writes all of the
answer), and the wait puts the answer into y. Both ends poll for long enough to stay awake, each on a core of its own
where there are two; `woken` is a round trip that finds the server asleep.

The floor counts bytes: n bytes each way are moved by the engine's core twice (into the ring, out of it) and by the
server's once (the kernel reads x and writes the delta where they lie in the ring), beside it. So it is two memcpys of
n bytes on one core, without the hops of a cache line from core to core; 1.0 of it is memcpy bandwidth.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import report

from infinilora.kernels.batch import Part, segment_table
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link import shm
from infinilora.link.ends import EngineEnd, ServerEnd
from infinilora.link.errors import LinkClosed
from infinilora.link.frame import Header, Kind, PlanSegment
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from infinilora.link.times import SiteTimes

COLS = 1024
STEP, SITE = 1, 0
WARM_UP = 300
AWAKE_S = 0.005
REST_S = 0.002
"""Long enough for the server to have gone to sleep."""
SIZES = (4 << 10, 64 << 10, 4 << 20)
MOST_4K_US, LEAST_SHARE, MOST_WOKEN_US = 10.0, 0.8, 60.0
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
def linked(backend: str, directory: Path, *, spin_s: float = AWAKE_S) -> Iterator[EngineEnd]:
    """An engine's end here; the server's in a forked process. `tcp_i8` is tcp with narrow rows."""
    settings = LinkSettings(
        directory=directory if backend == "shm" else None,
        spin_s=spin_s,
        narrowing="always" if backend == "tcp_i8" else "never",
    )
    offers = Offers(settings)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        pin(-1)
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
        sys.exit(f"a delta came back wrong by {error.max():.3g}")
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


def measure(directory: Path, n: int) -> dict[str, Trips]:
    """Round trips by back-end and KiB, and `shm_woken`."""
    memcpy = {size: memcpy_gb_s(size) for size in SIZES}
    trips: dict[str, Trips] = {}
    for backend in ("shm", "tcp", "tcp_i8"):
        with linked(backend, directory) as end:
            for size in SIZES:
                count = max(n * (64 << 10) // max(size, 64 << 10), 200)
                trips[f"{backend}_{size >> 10}k"] = round_trips(end, size, count, memcpy=memcpy[size])
    with linked("shm", directory, spin_s=shm.SPIN_S) as end:
        small = SIZES[0]
        trips["shm_woken"] = round_trips(end, small, 500, memcpy=memcpy[small], rest_s=REST_S)
    return trips


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=3000)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    pin(0)
    with TemporaryDirectory(dir=options.directory, prefix="bench-link-") as folder:
        trips = measure(Path(folder), options.n)
    for name, trip in trips.items():
        times = f"floor {trip.floor_us:7.2f} us, median {trip.median_us:8.1f}, p99 {trip.p99_us:8.1f}"
        rate = f"{trip.gb_s:6.2f} GB/s both ways, {trip.over_floor:.3f} of memcpy"
        print(f"{name:10} {trip.num_bytes >> 10:5d} KiB each way: {times}, {rate}, n={trip.n}")
    median_us, share = trips["shm_4k"].median_us, trips["shm_4096k"].over_floor
    woken_us = trips["shm_woken"].median_us
    report(
        "bench-link",
        median_us,
        MOST_4K_US,
        met=median_us <= MOST_4K_US and share >= LEAST_SHARE and woken_us <= MOST_WOKEN_US,
        unit="median us of a shm round trip of 4 KiB each way, both ends awake; and at least 0.8 of memcpy bandwidth "
        "at 4 MiB; and at most 60 us for a round trip that wakes the server",
        shm_4mib_over_memcpy=round(share, 3),
        woken_us=round(woken_us, 1),
        cores=len(CORES),
        trips={name: {k: round(v, 3) for k, v in asdict(trip).items()} for name, trip in trips.items()},
    )


if __name__ == "__main__":
    main()
