"""The ring core under stress: two processes that are killed at any moment, two threads that ThreadSanitizer watches.

The program is `support/ring_stress.cpp`, compiled here around the very sources of the library.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infinilora.kernels import native
from infinilora.kernels.settings import read_settings
from support.sanitizer import compile_watched

PROGRAM = Path(__file__).parents[2] / "support" / "ring_stress.cpp"
RING = Path(__file__).parents[3] / "libs" / "link" / "infinilora" / "link" / "native"
SOURCES = (PROGRAM, *sorted(RING.glob("moves_*.cpp")))
FLAGS = ("-std=c++20", "-g", "-w", f"-I{RING}")
RUN = """
import ctypes, sys
words = [word.encode() for word in sys.argv[1:]]
sys.exit(ctypes.CDLL(words[0]).main(len(words), (ctypes.c_char_p * len(words))(*words)))
"""
"""A library is run instead of a program: linking one needs nothing of a C++ run-time library."""

Stress = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Stress:
    """Run the program as the library's own compiler made it; what it counted."""
    folder = tmp_path_factory.mktemp("ring-stress")
    tools = native._toolchain(read_settings())
    objects = [folder / f"{source.stem}.o" for source in SOURCES]
    for source, target in zip(SOURCES, objects, strict=True):
        native._run(
            [*tools.compile, "-O2", "-fPIC", *FLAGS, str(source), "-o", str(target)], cwd=folder, zig_cache=_CACHE
        )
    library = folder / "ring_stress.so"
    native._run([*tools.link, *map(str, objects), "-o", str(library)], cwd=folder, zig_cache=_CACHE)
    return lambda *arguments: _counted([sys.executable, "-c", RUN, str(library), *map(str, arguments)])


_CACHE = read_settings().cache_dir / "zig"


def _counted(command: list[str]) -> dict[str, int]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def test_two_processes_that_are_killed_lose_double_and_mistake_nothing(stress: Stress) -> None:
    counts = stress("processes", 200_000, 1)
    assert counts["messages"] >= 200_000
    assert counts["kills"] >= 10, "either end was killed again and again"
    assert counts["closes"], "accounts were settled"
    assert counts["stale"] > 1000, "answers came that nobody waited for any more"
    assert counts["refused"]


def test_two_threads_agree_with_one_another_to_the_last_message(stress: Stress) -> None:
    counts = stress("threads", 200_000, 2)
    assert counts["lives"] == counts["closes"] + counts["quarantines"]
    assert counts["quarantines"], "some calls were given up at their deadline"


def test_thread_sanitizer_sees_no_race_in_the_ring(tmp_path: Path) -> None:
    program = tmp_path / "ring_stress"
    compile_watched(list(SOURCES), program, f"-I{RING}")
    assert _counted([str(program), "threads", "20000", "3"])["messages"] >= 20_000


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_million_messages_between_processes_that_are_killed(stress: Stress) -> None:
    for seed in range(10):
        assert stress("processes", 1_000_000, 100 + seed)["messages"] >= 1_000_000
