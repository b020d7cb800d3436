"""make bench-link: round trips over the link between two processes, and its bandwidth beside memcpy.

A round trip is what a site call costs beyond its product, as engine and LoRA server make it: a prepared call is sent,
the server computes the delta of the smallest adapter there is (rank one: it reads all of x and writes all of the
answer), and the wait puts the answer into y. Both ends poll for long enough to stay awake, each on a core of its own
where there are two. The bound for bandwidth is one memcpy of the same bytes: a round trip of n bytes each way
moves them three times (in, across by the server, out), of which the two ends overlap what they can.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import report

from infinilora.kernels.batch import Part, segment_table
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.ends import EngineEnd, ServerEnd
from infinilora.link.errors import LinkClosed
from infinilora.link.frame import Header, Kind, PlanSegment
from infinilora.link.open import LinkSettings, Offers, Opener, attach
from infinilora.link.times import SiteTimes

COLS = 1024
STEP, SITE = 1, 0
WARM_UP = 300
SPIN_S = 0.005


@dataclass(frozen=True, slots=True)
class Trips:
    """Round trips of one size: microseconds, and bytes moved (both ways) in a second."""

    num_bytes: int
    median_us: float
    p99_us: float
    n: int

    @property
    def gb_s(self) -> float:
        return 2 * self.num_bytes / self.median_us / 1e3


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
def linked(backend: str, directory: Path) -> Iterator[EngineEnd]:
    """An engine's end here; the server's in a forked process."""
    settings = LinkSettings(directory=directory if backend == "shm" else None, spin_s=SPIN_S)
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
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[core]})


def round_trips(end: EngineEnd, num_bytes: int, n: int) -> Trips:
    x = torch.randn(num_bytes // 4 // COLS, COLS)
    y = torch.zeros_like(x)
    times = []
    end.send_plan(STEP, [PlanSegment(0, x.shape[0], 0, 1)])
    ticket = end.prepare(Header(kind=Kind.SITE, site=SITE, rows=x.shape[0], in_cols=COLS, out_cols=COLS))
    for _ in range(WARM_UP + n):
        started = time.perf_counter()
        end.send(ticket, STEP, 0, x)
        end.wait(ticket, y, deadline_s=5.0, add=False)
        times.append(time.perf_counter() - started)
    if not torch.equal(x[:, :1].expand(-1, COLS), y):
        sys.exit("a delta came back wrong")
    kept = sorted(times[WARM_UP:])
    return Trips(num_bytes, 1e6 * statistics.median(kept), 1e6 * kept[len(kept) * 99 // 100], n)


def memcpy_gb_s(num_bytes: int, tries: int = 200) -> float:
    source, target = torch.randn(num_bytes // 4), torch.empty(num_bytes // 4)
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return num_bytes / statistics.median(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=3000)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    pin(0)
    memcpy = memcpy_gb_s(4 << 20)
    print(f"memcpy of 4 MiB: {memcpy:.1f} GB/s")
    rows: dict[str, dict[str, float]] = {}
    for backend in ("shm", "tcp"):
        with (
            TemporaryDirectory(dir=options.directory, prefix="bench-link-") as folder,
            linked(backend, Path(folder)) as end,
        ):
            for size in (4 << 10, 64 << 10, 4 << 20):
                trips = round_trips(end, size, max(options.n * (64 << 10) // max(size, 64 << 10), 200))
                print(
                    f"{backend}  {size >> 10:5d} KiB each way: median {trips.median_us:8.1f} us, "
                    f"p99 {trips.p99_us:8.1f} us, {trips.gb_s:5.2f} GB/s both ways, n={trips.n}"
                )
                rows[f"{backend}_{size >> 10}k"] = {
                    "median_us": round(trips.median_us, 1),
                    "p99_us": round(trips.p99_us, 1),
                    "gb_s": round(trips.gb_s, 2),
                }
    median_us = rows["shm_64k"]["median_us"]
    share = rows["shm_4096k"]["gb_s"] / memcpy
    report(
        "bench-link",
        median_us,
        30.0,
        met=median_us <= 30.0 and share >= 0.5,
        unit="median us of a shm round trip of 64 KiB each way; and at least 0.5 of memcpy bandwidth at 4 MiB",
        memcpy_gb_s=round(memcpy, 2),
        shm_4mib_over_memcpy=round(share, 3),
        spin_s=SPIN_S,
        trips=rows,
    )


if __name__ == "__main__":
    main()
