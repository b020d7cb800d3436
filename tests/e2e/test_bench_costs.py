"""`infinilora bench costs` on a tiny model: three systems are measured, and a simulation takes what came of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def infinilora(*words: object, cwd: Path) -> str:
    command = [sys.executable, "-m", "infinilora.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_costs_are_measured_and_simulated_with(tmp_path: Path) -> None:
    model = make_tiny_model("llama-long", tmp_path / "tiny").directory
    options = ["--rank", 2, "--rounds", 1, "--tokens", 96, "--threads", 1, "--model", model]
    infinilora("bench", "costs", *options, "--out", tmp_path / "costs.json", "--var-dir", tmp_path / "v", cwd=tmp_path)

    costs = json.loads((tmp_path / "costs.json").read_text())
    assert costs["is_measured"] is True
    assert costs["name"].startswith("tiny on ")
    assert costs["name"].endswith("threads: 1; adapters of rank 2 on all linears")
    measured = [*costs["base"].values(), *costs["local"].values(), *costs["remote"].values(), costs["gateway_s"]]
    for number in measured:
        assert number["source"].startswith("measured by `infinilora bench costs` on ")
        assert 0 <= number["value"] < 1
    assert costs["base"]["fixed_s"]["value"] + costs["base"]["floor_s"]["value"] > 0
    words = ["--set", f"costs={tmp_path / 'costs.json'}", "--set", "load.requests=50", "--json"]
    (served,) = json.loads(infinilora("simulate", *words, cwd=tmp_path))
    assert served["outcome"]["failed"] == 0
