"""Round trips over the `cuda` link between two processes on this machine's GPUs, and its bandwidth beside a copy.

    python benchmarks/gpu/bench_cuda_link.py [--n N] [--quick]

A trip is what a site call costs beyond its product: push, the server's copy of x into its answer, and the join. Trips
are launched one after another and timed on the engine's stream, so the host is in the time only where the link is
signalled by it. Who signals is what the link itself chose: without MPS, two processes on one GPU take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from device import bytes_per_s, conditions, elapsed_s, report, require_device

from infinilora.link.cuda import CudaEngineEnd
from infinilora.link.cuda_driver import CudaMemory, Regions
from infinilora.link.errors import LinkClosed
from infinilora.link.open import LinkSettings, Offers, Opener, attach

TARGET_US = 15.0
COLS = 2048
NUM_BUFFERS, BUFFER_BYTES = 8, 8 << 20
WARM_UP = 50


def settings_of(ordinal: int) -> LinkSettings:
    regions = Regions(CudaMemory(torch.device("cuda", ordinal)))
    return LinkSettings(directory=None, cuda=regions, num_buffers=NUM_BUFFERS, buffer_bytes=BUFFER_BYTES)


def serve(offers: str) -> None:
    """The other process: answer every call with what it carried, on the last GPU of this machine."""
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    opening = Opener(settings_of(torch.cuda.device_count() - 1)).choose(json.loads(offers))
    print(json.dumps([opening.chosen, opening.secret.hex()]), flush=True)
    end = opening.wait(60)
    try:
        while True:
            call = end.recv(5.0)
            if call is not None and call.x is not None:
                end.reply_buffer(call).copy_(call.x)
                end.reply(call)
    except LinkClosed:
        return


@contextmanager
def linked() -> Iterator[tuple[CudaEngineEnd, str]]:
    """An engine's end on the first GPU, and who signals."""
    settings = settings_of(0)
    command = [sys.executable, __file__, "--serve", json.dumps(Offers(settings).wire)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as server:
        assert server.stdout is not None
        chosen, secret = json.loads(server.stdout.readline())
        end = attach(chosen, bytes.fromhex(secret), settings, timeout_s=60)
        assert isinstance(end, CudaEngineEnd)
        try:
            yield end, chosen["signal"]
        finally:
            end.close()


def trips_us(end: CudaEngineEnd, num_bytes: int, n: int) -> list[float]:
    x = torch.randn(num_bytes // 2 // COLS, COLS, device="cuda").bfloat16()
    y = torch.zeros_like(x)
    end.send_plan(1, [])
    times = []
    for _ in range(WARM_UP + n):
        began = time.perf_counter()
        end.wait(end.submit(1, 0, 0, x, COLS), y, deadline_s=5.0, add=False)
        end.verify()
        times.append(1e6 * (time.perf_counter() - began))
    if not torch.equal(x, y):
        sys.exit("a delta came back wrong")
    return sorted(times[WARM_UP:])


def pipelined_us(end: CudaEngineEnd, num_bytes: int, n: int) -> float:
    """A trip where the next is launched before this one is back, as the sites of a step are."""
    x = torch.randn(num_bytes // 2 // COLS, COLS, device="cuda").bfloat16()
    y = torch.zeros_like(x)

    def trips() -> None:
        for _ in range(n):
            end.wait(end.submit(1, 0, 0, x, COLS), y, deadline_s=5.0, add=False)

    took_s = elapsed_s(trips)
    end.verify()
    return 1e6 * took_s / n


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="few trips: whether it runs at all")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = require_device()
    if options.serve:
        serve(options.serve)
        return
    copy_gb_s = bytes_per_s(device) / 1e9
    n = 100 if options.quick else options.n
    rows = {}
    with linked() as (end, signal):
        print(f"{torch.cuda.device_count()} GPUs, signalled by the {signal}; a copy moves {copy_gb_s:.0f} GB/s")
        for size in (16 << 10, 256 << 10, 4 << 20):
            alone, many = trips_us(end, size, n), pipelined_us(end, size, n)
            rows[f"{size >> 10}k"] = {
                "median_us": round(statistics.median(alone), 1),
                "p99_us": round(alone[len(alone) * 99 // 100], 1),
                "pipelined_us": round(many, 1),
                "gb_s": round(2 * size / many / 1e3, 2),
            }
            print(f"{size >> 10:6d} KiB each way: {rows[f'{size >> 10}k']}")
    value = rows["16k"]["pipelined_us"]
    facts = conditions(device, gpus=torch.cuda.device_count(), signal=signal, n=n, trips=rows)
    report("cuda-link", value, TARGET_US, met=value <= TARGET_US, **facts)


if __name__ == "__main__":
    main()
