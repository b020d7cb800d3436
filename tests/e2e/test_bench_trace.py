"""`infinilora bench trace` on a tiny model: a timeline of engine and LoRA server, its parts, and a picture."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def test_a_short_load_becomes_a_timeline(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "tiny").directory
    trace, picture = tmp_path / "trace.json", tmp_path / "layer.svg"
    options = {"--adapters": 2, "--rank": 4, "--streams": 4, "--tokens": 8, "--threads": 1, "--ping-pong": "on"}
    files = {"--model": model, "--out": trace, "--picture": picture, "--var-dir": tmp_path / "var"}
    command = [sys.executable, "-m", "infinilora.cli", "bench", "trace"]
    command += [str(word) for option in (options | files).items() for word in option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    calls = [e["name"] for e in events if e["cat"] == "link" and e["name"].startswith("add ")]
    computed = [e["name"] for e in events if e["cat"] == "computing"]
    assert calls
    assert sorted(computed) == sorted(name.removeprefix("add ") for name in calls), "the server computed each call"
    added = {e["name"]: e for e in events if e["cat"] == "link"}
    assert all(f"submit {name}" in added for name in computed)
    for part in ("kernels", "link", "exposed wait", "python", "computing"):
        assert part in done.stdout
    assert "<svg" in picture.read_text()
