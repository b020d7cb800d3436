"""What the GPU benchmarks share: the device's name and limits, times of launches without those of the host.

A time is the median of many replays of a CUDA graph in which each run takes another set of weights, so that what is
read is read from memory and not from the cache, as in a step that walks through its layers.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
RING_BYTES = 2 << 30
"""Weights of a case are taken in turn from so much memory: forty times the cache of a Hopper GPU."""


def require_device() -> torch.device:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: these benchmarks measure one (torch.cuda.is_available() is false)")
    return torch.device("cuda", torch.cuda.current_device())


def graph_s(run: Callable[[int], object], copies: int, *, replays: int = 30) -> float:
    """Seconds of run(i), i in turn, on the device alone."""
    for i in range(min(copies, 3)):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    times = [elapsed_s(graph.replay) / copies for _ in range(replays)]
    return statistics.median(times[replays // 5 :])


def elapsed_s(run: Callable[[], object]) -> float:
    """Seconds of what `run` launches on the current stream, from its beginning to its end there."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e-3


def bytes_per_s(device: torch.device) -> float:
    """Of memory, read and written by a copy of half a gigabyte: the floor that a kernel is held to."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_s(lambda _: target.copy_(source), 2)


def conditions(device: torch.device, **more: Any) -> dict[str, Any]:
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **more,
    }


def report(name: str, value: float, target: float, *, met: bool, **more: Any) -> None:
    """Print the last line."""
    print(json.dumps({"name": name, "value": round(value, 4), "target": target, "met": met, "conditions": more}))
