"""ThreadSanitizer watches the kernels' thread pool: `support/pool_stress.cpp`, compiled around its own source."""

import subprocess
from pathlib import Path

import pytest

from support.sanitizer import compile_watched

HERE = Path(__file__).parents[1]
POOL = HERE.parent / "kernels" / "infinilora" / "kernels" / "cpu"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("pool-stress") / "pool_stress"
    compile_watched([HERE / "support" / "pool_stress.cpp", POOL / "pool.cpp"], program, f"-I{POOL}")
    return program


@pytest.mark.parametrize(
    ("threads", "callers", "spin_us"),
    [(2, 1, 100), (2, 2, 0), (7, 3, 5)],
    ids=["one caller", "workers that sleep at once", "more threads than cores"],
)
def test_every_piece_is_taken_once_and_nothing_is_raced_for(
    program: Path, threads: int, callers: int, spin_us: int
) -> None:
    words = [str(program), "1500", str(threads), str(callers), str(spin_us)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "ok\n"
