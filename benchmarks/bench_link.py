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
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import report

from infinilora.bench.link_trips import CORES, Trips, linked, memcpy_gb_s, pin, round_trips
from infinilora.link import shm

REST_S = 0.002
"""Long enough for the server to have gone to sleep."""
SIZES = (4 << 10, 64 << 10, 4 << 20)
MOST_4K_US, LEAST_SHARE, MOST_WOKEN_US = 10.0, 0.8, 60.0


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
