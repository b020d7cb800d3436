"""Strangers' bytes: 20,000 inputs in the suite, a million in the soak. No crash, no hang, no memory past a limit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinilora.gateway import confine

CHILD = Path(__file__).with_name("child.py")
MEMORY_MB, CPU_S, FILES_MB = 1024, 3600, 64
KINDS = ("tensors", "config", "archive", "compressed", "form")
IN_SUITE, IN_SOAK, ROUND = 4_000, 200_000, 20_000
"""Inputs of each kind; and in one process, which keeps hypothesis from remembering them all."""


def round_of(kind: str, seed: int, count: int) -> dict[str, Any]:
    """What a confined process says after its inputs; fails with its last words otherwise."""
    limits = (str(os.getpid()), str(MEMORY_MB), str(CPU_S), str(FILES_MB))
    command = [
        sys.executable,
        "-IS",
        confine.__file__,
        *limits,
        sys.executable,
        str(CHILD),
        kind,
        str(seed),
        str(count),
    ]
    env = {"OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, f"{kind} seed {seed}: status {done.returncode}\n{done.stderr[-4000:]}"
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_are_taken_or_refused_by_name(kind: str) -> None:
    said = round_of(kind, 1, IN_SUITE)
    assert said["inputs"] >= IN_SUITE
    # A fuzzer that is always refused, or never, tests nothing.
    assert 0 < said["outcomes"]["taken"] < said["inputs"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_inputs_are_taken_or_refused_by_name(kind: str) -> None:
    rounds = [round_of(kind, 1000 + number, ROUND) for number in range(IN_SOAK // ROUND)]
    assert sum(said["inputs"] for said in rounds) >= IN_SOAK
    print(kind, json.dumps({"inputs": IN_SOAK, "slowest_s": max(said["slowest_s"] for said in rounds)}))
