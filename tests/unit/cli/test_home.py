"""The directory of a local system: one owner, kept secrets, nothing left of a killed owner."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from infinilora.cli.home import Home, Running
from infinilora.protocol.errors import Conflict, InvalidRequest

HOLDS = """
import sys, time
from pathlib import Path
from infinilora.cli.home import Home, Running
home = Home(Path(sys.argv[1]))
home.lock()
home.say_running(Running(pid=42, url="http://127.0.0.1:1", coordinator_url="http://127.0.0.1:2"))
(home.link_dir / "ring").write_bytes(b"x")
print("locked", flush=True)
time.sleep(99)
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def clear(home: Home) -> None:
    """A killed holder leaves its shared memory to the next owner of the directory."""
    home.lock()
    home.unlock()


def test_a_second_owner_is_refused_and_told_of_the_first(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    try:
        with pytest.raises(Conflict, match=r"in use by process 42, serving http://127\.0\.0\.1:1"):
            Home(tmp_path).lock()
        assert Home(tmp_path).running() is not None
    finally:
        end(holder)
        clear(Home(tmp_path))


def test_what_a_killed_owner_left_is_cleared(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    end(holder)
    home = Home(tmp_path)
    assert home.running() is not None
    home.lock()
    assert home.running() is None
    assert list(home.link_dir.iterdir()) == []
    home.unlock()
    assert not home.link_dir.exists()


def test_secrets_are_made_once_and_only_the_owner_reads_them(tmp_path: Path) -> None:
    first, second = Home(tmp_path).secrets(), Home(tmp_path).secrets()
    assert first == second
    assert len({first.nats, first.redis, first.s3_secret_key, first.rpc_token}) == 4
    assert stat.S_IMODE((tmp_path / "secrets.json").stat().st_mode) == 0o600


def test_two_directories_never_share_a_link_directory(tmp_path: Path) -> None:
    assert Home(tmp_path / "a").link_dir != Home(tmp_path / "b").link_dir


def test_a_running_system_is_found_by_other_commands(tmp_path: Path) -> None:
    running = Running(pid=1, url="http://u", coordinator_url="http://c")
    home = Home(tmp_path)
    home.lock()
    home.say_running(running)
    assert Home(tmp_path).running() == running
    home.unlock()


def test_the_log_of_the_start_before_is_kept(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.lock()
    home.new_log("engine").write_text("first")
    home.new_log("engine").write_text("second")
    assert (home.logs / "engine.log.1").read_text() == "first"
    home.unlock()


def test_secrets_of_an_earlier_release_get_an_operators_key_and_are_else_kept(tmp_path: Path) -> None:
    made = Home(tmp_path).secrets()
    path = tmp_path / "secrets.json"
    old = {name: value for name, value in json.loads(path.read_text()).items() if name != "admin_key"}
    path.write_text(json.dumps(old))
    again = Home(tmp_path).secrets()
    assert again == msgspec.structs.replace(made, admin_key=again.admin_key)
    assert len(again.admin_key) >= 32
    assert Home(tmp_path).secrets() == again
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_directory_that_cannot_be_made_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match=r"file/var cannot be written \(Not a directory\).*--var-dir"):
        Home(tmp_path / "file" / "var").lock()
