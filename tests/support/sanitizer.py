"""A compiler with ThreadSanitizer, where this machine has one."""

import shutil
import subprocess
from pathlib import Path

import pytest


def compile_watched(sources: list[Path], program: Path, *flags: str) -> None:
    """Build a program that ThreadSanitizer watches; the test is skipped, aloud, where no compiler here can."""
    compiler = _compiler(program.parent)
    if compiler is None:
        pytest.skip("NOT CHECKED FOR RACES: neither g++ nor clang++ is here with ThreadSanitizer; install one of them")
    command = [compiler, "-fsanitize=thread", "-O1", "-std=c++20", "-g", "-w", *flags, *map(str, sources), "-pthread"]
    subprocess.run([*command, "-o", str(program)], check=True)


def _compiler(folder: Path) -> str | None:
    """One whose programs run under ThreadSanitizer on this machine."""
    source, program = folder / "nothing.cpp", folder / "nothing"
    source.write_text("int main() { return 0; }\n")
    for name in ("g++", "clang++"):
        compiler = shutil.which(name)
        if compiler is None:
            continue
        built = subprocess.run(
            [compiler, "-fsanitize=thread", str(source), "-o", str(program)], capture_output=True, check=False
        )
        if built.returncode == 0 and subprocess.run([str(program)], capture_output=True, check=False).returncode == 0:
            return compiler
    return None
