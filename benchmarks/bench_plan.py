"""make bench-plan: the whole command `infinilora plan` for 2,000 adapters, from the start of its process to its end.

Two loads in turn: adapters of one size, and of four ranks, where the pool is measured in bytes. The value is the worse
of the two medians. Python's own start and imports are in it; their part is told. One thread is all it uses.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from harness import median, report

ADAPTERS, ROUNDS, TARGET_S = 2000, 9, 2.0
COMMAND = Path(sys.executable).with_name("infinilora")
LOAD = ["--adapters", str(ADAPTERS), "--zipf", "1.2", "--rate", "40", "--residence", "6", "--slo-ttft", "0.25"]
HOUSE = ["--model", "qwen3-30b-a3b", "--gpu-bytes", "90e9", "--json"]
RANKS = {"one size": "32", "four ranks": "8,16,32,64"}


def main() -> None:
    walls: dict[str, list[float]] = {kind: [] for kind in RANKS}
    plans, starts, cpu = {}, [], []
    for _ in range(ROUNDS + 1):  # the first warms the page cache
        starts.append(run(["plan", "--help"])[0])
        for kind, rank in RANKS.items():
            before = cpu_s()
            seconds, plans[kind] = run(["plan", *LOAD, *HOUSE, "--rank", rank])
            cpu.append(cpu_s() - before)
            walls[kind].append(seconds)
    medians = {kind: median(seconds[1:]) for kind, seconds in walls.items()}
    for kind, seconds in medians.items():
        found = json.loads(plans[kind])
        print(f"{kind}: {seconds:.3f} s, {found['slots']} slots on {found['shards']} shards", flush=True)
    worst = max(medians.values())
    report(
        "bench-plan",
        worst,
        TARGET_S,
        met=worst <= TARGET_S,
        unit="seconds of wall time, whole command",
        adapters=ADAPTERS,
        seconds_by_load={kind: round(seconds, 4) for kind, seconds in medians.items()},
        slowest_s=round(max(max(seconds[1:]) for seconds in walls.values()), 4),
        cpu_s=round(median(cpu), 4),
        start_of_python_s=round(median(starts[1:]), 4),
        load_average=[round(value, 2) for value in os.getloadavg()],
        n=ROUNDS,
    )


def cpu_s() -> float:
    """Processor seconds of the commands that have ended: what a crowded machine does not stretch."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(words: list[str]) -> tuple[float, str]:
    """(seconds, what it printed)."""
    start = time.perf_counter()
    done = subprocess.run([COMMAND, *words], check=True, capture_output=True, text=True)
    return time.perf_counter() - start, done.stdout


if __name__ == "__main__":
    main()
