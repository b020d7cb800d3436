"""A call of the native library asks for no memory where one of its size was made before.

In a process of its own, in which it is counted how often the C library is asked for memory. Python asks now and then,
so what is looked at is whether a thousand calls ask for anything like a thousand times.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from infinilora.kernels import native
from infinilora.kernels.settings import read_settings

SUPPORT = Path(__file__).parents[1] / "support"
CALLS, NOW_AND_THEN = 1000, 50


def test_calls_ask_for_no_memory(tmp_path: Path) -> None:
    settings = read_settings()
    tools, cache = native._toolchain(settings), settings.cache_dir / "zig"
    made, counting = tmp_path / "counted.o", tmp_path / "counted.so"
    source = SUPPORT / "counted_malloc.cpp"
    native._run([*tools.compile, "-O2", "-fPIC", str(source), "-o", str(made)], cwd=tmp_path, zig_cache=cache)
    native._run([*tools.link, str(made), "-o", str(counting)], cwd=tmp_path, zig_cache=cache)

    program = [sys.executable, str(SUPPORT / "counted_calls.py"), str(CALLS)]
    env = {**os.environ, "LD_PRELOAD": str(counting)}
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    asked: dict[str, int] = json.loads(done.stdout)
    assert asked.pop("asks each time") >= CALLS
    assert {name: times for name, times in asked.items() if times > NOW_AND_THEN} == {}
