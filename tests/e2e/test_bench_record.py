"""`infinilora bench record` on a tiny model: a run is written down, and a simulation is held against it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def infinilora(*words: object, cwd: Path) -> str:
    command = [sys.executable, "-m", "infinilora.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_recorded_and_simulated(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "tiny").directory
    options = ["--adapters", 2, "--rank", 4, "--rate", 20, "--requests", 12, "--tokens", 6, "--prompt", 5, "--seed", 3]
    files = ["--model", model, "--out", tmp_path / "record.json", "--var-dir", tmp_path / "var", "--threads", 1]
    infinilora("bench", "record", *options, *files, cwd=tmp_path)

    record = json.loads((tmp_path / "record.json").read_text())
    rows = record["requests"]
    assert len(rows) == 12
    assert len(record["adapter_bytes"]) == 2
    assert record["fleet"] == {"mode": "disaggregated", "engines": 1, "is_pool_warm": True}
    for row in rows:
        assert row["prompt"] == 5
        assert row["adapter"] in (0, 1)
        assert 3 <= row["output"] <= 9
        assert 0 < row["ttft_s"] <= row["end_s"] - row["arrival_s"] + 1e-5
    (found,) = json.loads(infinilora("simulate", "compare", tmp_path / "record.json", "--json", cwd=tmp_path))
    assert found["tokens_per_s"][0] == pytest.approx(
        sum(r["output"] for r in rows) / (max(r["end_s"] for r in rows) - min(r["arrival_s"] for r in rows)), rel=1e-6
    )
    assert found["ttft_p95_s"][0] == sorted(r["ttft_s"] for r in rows)[11]
