"""Builds and loads the one native library: LoRA kernels, the engine's CPU operations, the link's ring core.

    sources (kernels/cpu, link/native) --compile each--> objects --link--> <cache>/<hash>/_native.so

The compiler is the one in the `ziglang` wheel, so no system compiler is needed. The library uses nothing of
the C++ run-time library (no exceptions, no `new`, no containers): it is linked from its objects alone, and
what it needs of libc the Python process already has. A file named `*_avx2.cpp` or `*_avx512.cpp` is compiled
for that instruction set, and run only where the processor has it.

    python -m infinilora.kernels.native     builds, and prints the path
"""

import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import infinilora
from infinilora.kernels import settings as native_settings
from infinilora.kernels.abi import declare
from infinilora.kernels.settings import LEVELS, NativeSettings

logger = logging.getLogger(__name__)

COMMON_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-stack-protector",
    "-Wall",
)
AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mprfchw")
AVX512_FLAGS = (*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
SOURCE_FOLDERS = ("kernels/cpu", "link/native")
X86_64 = platform.machine() in ("x86_64", "AMD64")
BUILD_TIMEOUT_S = 600.0


class NativeBuildError(RuntimeError):
    """The library could not be built; the message holds the command and what the compiler said."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """How to compile and link, and a name that changes when either would come out differently."""

    compile: tuple[str, ...]
    link: tuple[str, ...]
    name: str


def build(settings: NativeSettings | None = None) -> Path:
    """Return the library's path, compiling it first where the cache lacks it. Raises NativeBuildError.

    Blocks while another process builds the same library.
    """
    if sys.platform != "linux":
        raise NativeBuildError(f"the native library is written for Linux; this is {sys.platform}")
    settings = settings or native_settings.read_settings()
    sources = _sources()
    toolchain = _toolchain(settings)
    folder = settings.cache_dir / _fingerprint(sources, toolchain)
    library = folder / "_native.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not library.exists():
                _compile(sources, toolchain, library)
    return library


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the process's native library, ready to call; None (said once) where it is off or cannot be had."""
    settings = native_settings.read_settings()
    if not settings.enabled:
        logger.warning("native library switched off by INFINILORA_NATIVE; the torch fallbacks are slow")
        return None
    try:
        library = declare(ctypes.CDLL(str(build(settings))))
    except (NativeBuildError, OSError) as error:
        logger.warning("native library cannot be had; the torch fallbacks are slow", extra={"reason": str(error)})
        return None
    if settings.level is not None:
        library.il_limit_level(LEVELS.index(settings.level))
    return library


def _sources() -> list[Path]:
    """Every .cpp of the library. The link room lies beside ours in the namespace; we do not import it."""
    folders = [Path(root) / folder for root in infinilora.__path__ for folder in SOURCE_FOLDERS]
    return sorted(path for folder in set(folders) for path in folder.glob("*.cpp") if _wanted(path))


def _wanted(source: Path) -> bool:
    return X86_64 or not source.stem.endswith(("_avx2", "_avx512"))


def _headers(sources: list[Path]) -> list[Path]:
    return sorted(path for folder in {s.parent for s in sources} for path in folder.glob("*.h"))


def _flags(source: Path) -> tuple[str, ...]:
    if source.stem.endswith("_avx512"):
        return (*COMMON_FLAGS, *AVX512_FLAGS)
    if source.stem.endswith("_avx2"):
        return (*COMMON_FLAGS, *AVX2_FLAGS)
    return COMMON_FLAGS


def _toolchain(settings: NativeSettings) -> Toolchain:
    if settings.compiler is not None:
        compiler = shutil.which(settings.compiler)
        if compiler is None:
            raise NativeBuildError(f"INFINILORA_CXX names {settings.compiler!r}, which is not an executable")
        version = _run([compiler, "--version"], cwd=Path.cwd(), zig_cache=Path.cwd()).splitlines()[0]
        return Toolchain((compiler, "-c"), (compiler, "-shared"), version)
    if importlib.util.find_spec("ziglang") is None:
        raise NativeBuildError("no compiler: install the `ziglang` wheel, or set INFINILORA_CXX to one")
    zig = (sys.executable, "-m", "ziglang")
    target = ("-target", f"{'x86_64' if X86_64 else platform.machine()}-linux-gnu.2.28")
    version = importlib.metadata.version("ziglang")
    # LLD from objects alone: the driver would first build zig's own run-time libraries, half a minute.
    return Toolchain((*zig, "c++", *target, "-c"), (*zig, "ld.lld", "-shared", "-z", "now"), f"zig {version}")


def _fingerprint(sources: list[Path], toolchain: Toolchain) -> str:
    digest = hashlib.sha256()
    facts = [toolchain.name, *toolchain.compile[3:], *toolchain.link[3:], *COMMON_FLAGS, *AVX512_FLAGS]
    for fact in facts:
        digest.update(f"{len(fact)}:{fact}".encode())
    for path in (*sources, *_headers(sources)):
        data = path.read_bytes()
        digest.update(f"{path.name}:{len(data)}:".encode() + data)
    return digest.hexdigest()[:20]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(sources: list[Path], toolchain: Toolchain, library: Path) -> None:
    zig_cache = library.parent.parent / "zig"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        work = Path(folder)

        def compile_one(source: Path) -> Path:
            target = work / f"{source.parent.name}_{source.stem}.o"
            command = [*toolchain.compile, *_flags(source), str(source), "-o", str(target)]
            _run(command, cwd=work, zig_cache=zig_cache)
            return target

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, sources))
        linked = work / library.name
        _run([*toolchain.link, *map(str, objects), "-o", str(linked)], cwd=work, zig_cache=zig_cache)
        linked.replace(library)
    logger.info("native library built", extra={"path": str(library), "compiler": toolchain.name})


def _run(command: list[str], *, cwd: Path, zig_cache: Path) -> str:
    environment = native_settings.compiler_environment(zig_cache)
    try:
        done = subprocess.run(  # noqa: S603 - the compiler and our own sources
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise NativeBuildError(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> int:
    try:
        library = build()
        ctypes.CDLL(str(library))
    except (NativeBuildError, OSError) as error:
        sys.stderr.write(f"the native library cannot be built; the torch fallbacks are slow\n{error}\n")
        return 1
    sys.stdout.write(f"{library}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
