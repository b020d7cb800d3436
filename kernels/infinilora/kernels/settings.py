"""What the environment says about the native library. The one reader of it in this room."""

import os
from dataclasses import dataclass
from pathlib import Path

LEVELS = ("portable", "avx2", "avx512")
"""Instruction sets, weakest first; the number the library knows one by is its index."""


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """`enabled`: INFINILORA_NATIVE is not off. `cache_dir`: INFINILORA_NATIVE_DIR, where libraries are built and found.

    `compiler`: INFINILORA_CXX, a C++20 compiler to use instead of the ziglang wheel's. `level`:
    INFINILORA_NATIVE_LEVEL, the strongest instruction set to use; None takes what the processor has.
    """

    enabled: bool
    cache_dir: Path
    compiler: str | None
    level: str | None


def read_settings() -> NativeSettings:
    """Read the environment. Raises ValueError naming a variable that is neither of its values."""
    switch = os.environ.get("INFINILORA_NATIVE", "on")
    if switch not in ("on", "off"):
        raise ValueError(f"INFINILORA_NATIVE is {switch!r}; wanted 'on' or 'off'")
    level = os.environ.get("INFINILORA_NATIVE_LEVEL") or None
    if level is not None and level not in LEVELS:
        raise ValueError(f"INFINILORA_NATIVE_LEVEL is {level!r}; wanted one of {', '.join(LEVELS)}")
    place = os.environ.get("INFINILORA_NATIVE_DIR")
    return NativeSettings(
        enabled=switch == "on",
        cache_dir=Path(place) if place else Path.home() / ".cache" / "infinilora" / "native",
        compiler=os.environ.get("INFINILORA_CXX") or None,
        level=level,
    )


def compiler_environment(zig_cache: Path) -> dict[str, str]:
    """The environment for a compiler: ours, with zig's caches where we may write."""
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(zig_cache), "ZIG_LOCAL_CACHE_DIR": str(zig_cache)}
    return {**os.environ, **caches}
