"""`infinilora up` as a person runs it: it serves, stops without a trace, and survives its own death."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from infinilora.cli.home import Home
from support.cases import Files, Oracle, config, keyed, make_base, modules
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


class Up:
    """One `infinilora up` in a session of its own, as under a terminal."""

    def __init__(self, var_dir: Path, model: Path, *options: str) -> None:
        self.var_dir = var_dir
        command = [sys.executable, "-m", "infinilora.cli", "up", "--var-dir", str(var_dir), "--model", str(model)]
        self.process = subprocess.Popen(
            [*command, "--served-name", "tiny", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        self.said = ""

    def read_until(self, pattern: str, *, within_s: float = 120) -> re.Match[str]:
        """Read what it says until the pattern is in it."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + within_s
        while not (found := re.search(pattern, self.said)):
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self.process.stdout], [], [], max(0, left))
            assert readable, f"no {pattern!r} within {within_s} s:\n{self.said}"
            piece = os.read(self.process.stdout.fileno(), 65_536)
            assert piece, f"ended with status {self.process.wait()}:\n{self.said}"
            self.said += piece.decode()
        return found

    def url(self) -> str:
        return self.read_until(r"is serving tiny at (http://127\.0\.0\.1:\d+)").group(1)

    def end(self, number: signal.Signals | None = None, *, within_s: float = 60) -> int:
        if number:
            self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=within_s)
        self.said += said.decode()
        return self.process.returncode


class Ups:
    """Starts them, and kills at the end what a failed test has left."""

    def __init__(self) -> None:
        self.started: list[Up] = []

    def __call__(self, var_dir: Path, model: Path, *options: str) -> Up:
        self.started.append(Up(var_dir, model, *options))
        return self.started[-1]

    def end(self) -> None:
        for up in self.started:
            if up.process.returncode is None:
                up.end(signal.SIGKILL)
            shutil.rmtree(Home(up.var_dir).link_dir, ignore_errors=True)


@pytest.fixture
def ups() -> Iterator[Ups]:
    starter = Ups()
    yield starter
    starter.end()


def processes_of(var_dir: Path) -> dict[int, str]:
    """Every living process whose environment or arguments name this directory."""
    mark, found = str(var_dir).encode(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                is_zombie = b") Z " in (entry / "stat").read_bytes()
            except OSError:
                continue
            if mark in text and not is_zombie:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_until_gone(var_dir: Path, *, within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while left := processes_of(var_dir):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def complete(url: str) -> list[int]:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60)
    assert answer.is_success, f"{answer.status_code}: {answer.text}"
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny").directory


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_and_a_signal_ends_all_of_it(number: signal.Signals, ups: Ups, model: Path, tmp_path: Path) -> None:
    up = ups(tmp_path / "var", model)
    assert len(complete(up.url())) == 4
    status = subprocess.run(
        [sys.executable, "-m", "infinilora.cli", "status", "--json", "--var-dir", str(tmp_path / "var")],
        capture_output=True,
        text=True,
        check=True,
    )
    kinds = {member["kind"] for member in json.loads(status.stdout)["fleet"]["members"]}
    assert kinds == {"coordinator", "engine", "gateway", "lora-server"}
    assert up.end(number) == 0, up.said
    assert processes_of(tmp_path / "var") == {}
    assert not Home(tmp_path / "var").link_dir.exists()


def test_an_operator_needs_no_more_than_its_directory(ups: Ups, tmp_path: Path) -> None:
    """And the shape that it picks by itself serves; on two cores there is room for one process."""
    base, var_dir = make_base("L", tmp_path / "tiny"), tmp_path / "var"
    adapter = Files(config(), keyed(Oracle(base).loras(modules("q_proj"), seed=1))).write(tmp_path / "adapter")
    up = ups(var_dir, base, "--lora-shape", "auto", "--threads", "2", "--max-engines", "2")
    url = up.url()
    assert "shape 1x1 of at most 1 shards" in up.said
    assert "measured by" in (var_dir / "constants.json").read_text()

    def infinilora(*arguments: str) -> str:
        command = [sys.executable, "-m", "infinilora.cli", *arguments, "--var-dir", str(var_dir)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    digest = infinilora("adapter", "push", str(adapter), "--name", "one").split()[1]
    assert f"default/one pinned ({digest})" in infinilora("pin", "one")
    assert f"default/one was pinned already ({digest})" in infinilora("pin", "one")
    infinilora("freeze", "--reason", "a test")
    for command in (("status",), ("top", "--looks", "1")):
        shown = infinilora(*command)
        assert "coordinator-0 leads, epoch 1; frozen by local at" in shown
        assert ": a test" in shown
    infinilora("unfreeze")

    def wait_for(row: str) -> None:
        deadline = time.monotonic() + 60
        while row not in (shown := re.sub(" +", " ", infinilora("status"))):
            assert time.monotonic() < deadline, shown

    infinilora("drain", "engine-0")
    wait_for("engine-0 draining")
    infinilora("undrain", "engine-0")
    wait_for("engine-0 ready")
    assert "engines of tiny: 2" in infinilora("scale", "engines", "2")
    wait_for("engine-1 ready")
    assert "engines of tiny: auto" in infinilora("scale", "engines", "auto")
    assert len(complete(url)) == 4
    assert len(json.loads(infinilora("audit", "--json"))) == 8
    assert up.end(signal.SIGTERM) == 0, up.said


def test_killed_it_leaves_no_process_and_the_next_one_starts_over_what_it_left(
    ups: Ups, model: Path, tmp_path: Path
) -> None:
    var_dir = tmp_path / "var"
    first = ups(var_dir, model, "--lora", "local")
    tokens = complete(first.url())
    first.end(signal.SIGKILL)
    wait_until_gone(var_dir)
    second = ups(var_dir, model, "--lora", "local")
    assert complete(second.url()) == tokens
    assert second.end(signal.SIGTERM) == 0, second.said


def test_a_second_one_in_the_same_directory_is_refused_and_the_first_serves_on(
    ups: Ups, model: Path, tmp_path: Path
) -> None:
    var_dir = tmp_path / "var"
    first = ups(var_dir, model, "--lora", "local")
    url = first.url()
    second = ups(var_dir, model)
    assert second.end() == 1
    assert f"conflict: {var_dir} is in use by process {first.process.pid}, serving {url}" in second.said
    assert len(complete(url)) == 4
    assert first.end(signal.SIGTERM) == 0, first.said


def test_servers_of_ones_own_are_used_and_none_is_started(ups: Ups, model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    up = ups(tmp_path / "var", model, "--lora", "local", "--store", f"file://{store}")
    assert len(complete(up.url())) == 4
    assert list(store.glob("bases/*/card.json"))
    assert not any("weed" in command for command in processes_of(tmp_path / "var").values())
    assert up.end(signal.SIGINT) == 0, up.said


def test_a_stop_during_the_start_ends_all_of_it(ups: Ups, model: Path, tmp_path: Path) -> None:
    up = ups(tmp_path / "var", model)
    up.read_until("NATS +ready")
    assert up.end(signal.SIGINT) == 0, up.said
    assert processes_of(tmp_path / "var") == {}
