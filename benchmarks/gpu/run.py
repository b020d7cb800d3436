"""Everything here that needs a GPU, in one call: the tests, then the benchmarks; one JSON line of what each said.

    python benchmarks/gpu/run.py [--quick] [--tune]

Ends with 1 if a test failed or a benchmark did not finish, and with a message where there is no device. A benchmark
that misses its target is no failure: its line says so.
"""

import argparse
import json
import subprocess
import sys

from device import ROOT, conditions, require_device

TESTS = ["-m", "pytest", "-q", "tests/kernels", "-m", "not soak", "--timeout=600"]
"""The suite's own kernel tests: on a device those marked `gpu` run, the services among them, and the `cuda` link's
run on it."""

BENCHMARKS = ("bench_kernels", "bench_cuda_link", "bench_services", "bench_tpot")


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit code and last line; the rest goes to the terminal as it comes."""
    last = ""
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="short benchmarks: whether they run at all")
    parser.add_argument("--tune", action="store_true", help="first measure the tile table of this device")
    options = parser.parse_args()
    device = require_device()
    said = {}
    code, said["tests"] = run(TESTS)
    is_well = code == 0
    names = (*(("tune_tiles",) if options.tune else ()), *BENCHMARKS)
    for name in names:
        flags = ["--quick"] if options.quick and name in BENCHMARKS else []
        code, line = run([f"benchmarks/gpu/{name}.py", *flags])
        is_well = is_well and code == 0
        said[name] = json.loads(line) if code == 0 else f"ended with {code}: {line}"
    print(json.dumps({"name": "gpu", "value": int(is_well), "conditions": conditions(device), "said": said}))
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
