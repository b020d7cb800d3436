"""`python -m infinilora.bench.link`: the constants of the cost model that this machine can measure, as a JSON line.

    call_s     half of a round trip of one small row, less the kernel's part
    peer_s     half of what a second server makes such a round trip longer
    launch_s   the kernel's part: one row of an adapter of rank one
    link       bytes moved both ways by a large round trip, over what it takes longer than the small one
    memory     reads by all threads, of more than any cache holds

Knows no model and no file.
"""

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from infinilora.bench.floors import read_bandwidth
from infinilora.bench.link_trips import COLS, CORES, SITE, STEP, WARM_UP, linked, memcpy_gb_s, pin, round_trips
from infinilora.kernels.batch import Part, segment_table
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.engine_end import EngineEnd
from infinilora.link.frame import Header, Kind, PlanSegment

SMALL, LARGE = 4 << 10, 4 << 20
LEAST_S = 1e-7
"""What cannot be told from nothing: a hundred nanoseconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, and bytes a second; as the constants of planning are named."""

    call_s: float
    peer_s: float
    launch_s: float
    link_bytes_per_s: float
    memory_bytes_per_s: float
    host_bytes_per_s: float


def measure(directory: Path, *, n: int, threads: int) -> Measured:
    """Some seconds. The link is `shm` over a file in the directory."""
    launch_s = kernel_s(n)
    with linked("shm", directory) as end:
        small = round_trips(end, SMALL, n, memcpy=1.0).median_us / 1e6
        large = round_trips(end, LARGE, max(50, n // 64), memcpy=1.0).median_us / 1e6
        one = together([end], n)
    with ExitStack() as stack:
        ends = [stack.enter_context(linked("shm", directory, core=-1 - peer % len(CORES))) for peer in range(2)]
        two = together(ends, n)
    return Measured(
        call_s=max(LEAST_S, (small - launch_s) / 2),
        peer_s=max(LEAST_S, (two - one) / 2),
        launch_s=max(LEAST_S, launch_s),
        link_bytes_per_s=2 * (LARGE - SMALL) / max(LEAST_S, large - small),
        memory_bytes_per_s=read_bandwidth(threads, num_bytes=256 << 20, tries=4),
        host_bytes_per_s=1e9 * memcpy_gb_s(64 << 20, 10),
    )


def kernel_s(n: int) -> float:
    """The median of computing one row of the smallest adapter here, without a link."""
    kernels = SlotKernels(num_slots=1, num_layers=1)
    part = Part(a=torch.ones(1, COLS), bt=torch.ones(1, COLS), scale=1.0, out_offset=0)
    kernels.bind(0, 0, SITE, (part,), COLS, COLS)
    rows, x, y = segment_table([(0, 1, 0)]), torch.ones(1, COLS), torch.zeros(1, COLS)
    times = []
    for _ in range(WARM_UP + n):
        started = time.perf_counter()
        kernels.dense(0, SITE, rows, x, y, accumulate=False)
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])


def together(ends: list[EngineEnd], n: int) -> float:
    """The median of one small call to every end at once, until all have answered."""
    x, y = torch.ones(1, COLS), torch.zeros(1, COLS)
    header = Header(kind=Kind.SITE, site=SITE, rows=1, in_cols=COLS, out_cols=COLS)
    tickets = []
    for end in ends:
        end.send_plan(STEP, [PlanSegment(0, 1, 0, 1)])
        tickets.append(end.prepare(header))
    times = []
    for _ in range(WARM_UP + n):
        started = time.perf_counter()
        for end, ticket in zip(ends, tickets, strict=True):
            end.send(ticket, STEP, 0, x)
        for end, ticket in zip(ends, tickets, strict=True):
            end.wait(ticket, y, deadline_s=5.0, add=False)
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=len(CORES))
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pin(0)
    with TemporaryDirectory(dir=options.directory, prefix="bench-link-") as folder:
        found = measure(Path(folder), n=options.n, threads=options.threads)
    print(json.dumps(asdict(found)))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
