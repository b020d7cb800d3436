"""Building, loading and the thread pool."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from infinilora.kernels import cpu_ops, native, settings
from infinilora.kernels.native import NativeBuildError
from infinilora.kernels.settings import LEVELS, NativeSettings
from support.instruction_sets import limited_to

PROBE = (
    "import torch\n"
    "from infinilora.kernels import cpu_ops, native\n"
    "w = cpu_ops.PackedWeight.pack(torch.eye(40))\n"
    "print(native.load() is not None, float(cpu_ops.linear(torch.ones(2, 40), w).sum()))\n"
)


def probe(**environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_off_means_the_fallback_and_says_so_once() -> None:
    done = probe(INFINILORA_NATIVE="off")
    assert done.stdout.split() == ["False", "80.0"]
    assert done.stderr.count("fallbacks are slow") == 1


def test_a_level_can_be_forced_from_outside() -> None:
    done = probe(INFINILORA_NATIVE_LEVEL="portable")
    assert done.stdout.split() == ["True", "80.0"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_test_of_an_instruction_set_runs_with_it(level: str) -> None:
    with limited_to(level) as found:
        assert found == level


def test_a_missing_compiler_means_the_fallback_and_names_it(tmp_path: Path) -> None:
    done = probe(INFINILORA_CXX="no-such-compiler", INFINILORA_NATIVE_DIR=str(tmp_path))
    assert done.stdout.split() == ["False", "80.0"]
    wanted = NativeSettings(enabled=True, cache_dir=tmp_path, compiler="no-such-compiler", level=None)
    with pytest.raises(NativeBuildError, match="no-such-compiler"):
        native.build(wanted)


@pytest.mark.parametrize(("name", "value"), [("INFINILORA_NATIVE", "maybe"), ("INFINILORA_NATIVE_LEVEL", "avx3")])
def test_a_wrong_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        settings.read_settings()


def test_what_the_compiler_says_is_in_the_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int f() { return undeclared_name; }\n")
    toolchain = native._toolchain(settings.read_settings())
    (tmp_path / "out").mkdir()
    with pytest.raises(NativeBuildError, match="undeclared_name"):
        native._compile([broken], toolchain, tmp_path / "out" / "_native.so")


def test_builders_at_once_make_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(native, "_sources", lambda: [source])
    wanted = NativeSettings(enabled=True, cache_dir=tmp_path / "cache", compiler=None, level=None)
    with ThreadPoolExecutor(4) as pool:
        paths = {build.result() for build in [pool.submit(native.build, wanted) for _ in range(4)]}
    assert len(paths) == 1
    folder = paths.pop().parent
    assert sorted(p.name for p in folder.iterdir()) == ["_native.so", "lock"]
    source.write_text('extern "C" int one() { return 2; }\n')
    assert native.build(wanted).parent != folder


def test_the_pool_is_as_wide_as_set_and_can_change() -> None:
    library = native.load()
    assert library is not None
    for width in (1, 3, 2, 2, 1):
        assert cpu_ops.set_threads(width) == width
        assert library.il_num_threads() == width
    with pytest.raises(ValueError, match="at least one"):
        cpu_ops.set_threads(0)


def test_callers_from_many_threads_each_get_their_own_answer() -> None:
    cpu_ops.set_threads(2)
    weight = torch.randn(512, 256)
    packed = cpu_ops.PackedWeight.pack(weight)
    wrong: list[int] = []

    def call(seed: int) -> None:
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
        wanted = (x.double() @ weight.double().T).float()
        good = [torch.allclose(cpu_ops.linear(x, packed), wanted, atol=1e-3) for _ in range(150)]
        wrong.append(good.count(False))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0, 0, 0]


def test_sleeping_workers_wake_and_the_width_may_change_between_calls() -> None:
    library = native.load()
    assert library is not None
    library.il_set_spin(0)  # every wait goes to sleep at once
    x, weight = torch.randn(8, 256), torch.randn(512, 256)
    packed = cpu_ops.PackedWeight.pack(weight)
    wanted = (x.double() @ weight.double().T).float()
    for round_number in range(300):
        if round_number % 50 == 0:
            cpu_ops.set_threads(1 + round_number // 50 % 3)
        assert torch.allclose(cpu_ops.linear(x, packed), wanted, atol=1e-3)
    library.il_set_spin(100_000)


def test_a_forked_child_works_alone() -> None:
    code = (
        "import os, torch\n"
        "from infinilora.kernels import cpu_ops\n"
        "cpu_ops.set_threads(2)\n"
        "w = cpu_ops.PackedWeight.pack(torch.ones(512, 256)); x = torch.ones(4, 256)\n"
        "cpu_ops.linear(x, w)\n"
        "pid = os.fork()\n"
        "good = bool((cpu_ops.linear(x, w) == 256).all())\n"
        "if pid == 0:\n"
        "    good = good and cpu_ops.set_threads(2) == 2 and bool((cpu_ops.linear(x, w) == 256).all())\n"
        "    os._exit(0 if good else 1)\n"
        "print(good, os.waitpid(pid, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True", "0"], done.stderr
