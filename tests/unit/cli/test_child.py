"""A supervised program: alive again after a death, gone after a stop, and never alive after its supervisor."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infinilora.cli.child import LEASH, Child, Program, tail
from infinilora.protocol.errors import Unavailable

STAYS = "import signal; signal.sigwait([signal.SIGTERM])"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
HAS_A_CHILD = (
    "import signal, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
    "print(p.pid, flush=True); signal.sigwait([signal.SIGTERM])"
)


def program(code: str, *, is_ready: bool = True, ready_within_s: float = 10, stop_within_s: float = 10) -> Program:
    async def probe() -> bool:
        return is_ready

    return Program(
        name="child",
        argv=(sys.executable, "-S", "-c", code),
        env=os.environ,
        is_ready=probe,
        ready_within_s=ready_within_s,
        stop_within_s=stop_within_s,
    )


class Heard:
    """What a child reports."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, name: str, event: str) -> None:
        self.events.append(event)


@asynccontextmanager
async def running(what: Program, tmp_path: Path, heard: Heard | None = None) -> AsyncIterator[Child]:
    child = Child(what, tmp_path / "child.log", heard or Heard())
    child.start()
    try:
        yield child
    finally:
        await child.stop()


async def until(condition: Callable[[], object], *, within_s: float = 10) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_a_program_that_cannot_be_started_for_a_while_is_tried_again(tmp_path: Path) -> None:
    heard = Heard()
    async with running(program(STAYS), tmp_path, heard) as child:
        await child.until_ready()
        child.log.unlink()
        child.log.mkdir()
        child.kill()
        await until(lambda: any("could not be started" in event for event in heard.events))
        child.log.rmdir()
        await until(lambda: child.pid)


async def test_a_killed_program_runs_again_under_a_new_pid(tmp_path: Path) -> None:
    heard = Heard()
    async with running(program(STAYS), tmp_path, heard) as child:
        await child.until_ready()
        first = child.pid
        child.kill()
        await until(lambda: child.pid not in (None, first))
        assert heard.events == ["was killed by SIGKILL; starting it again in 0.2 s"]


async def test_one_whose_readiness_nobody_waited_for_runs_again_as_often_as_it_dies(tmp_path: Path) -> None:
    async with running(program(STAYS), tmp_path) as child:
        for _ in range(3):
            await until(lambda: child.pid)
            before = child.pid
            child.kill()
            await until(lambda before=before: child.pid not in (None, before))  # type: ignore[misc]  # bound now


async def test_a_stopped_program_is_gone_and_stays_gone(tmp_path: Path) -> None:
    heard = Heard()
    async with running(program(STAYS), tmp_path, heard) as child:
        await child.until_ready()
        pid = child.pid
        assert pid is not None
        await child.stop()
        assert not is_alive(pid)
        assert child.pid is None
    assert heard.events == []


async def test_a_program_that_ignores_the_request_to_stop_is_killed(tmp_path: Path) -> None:
    heard = Heard()
    async with running(program(STUBBORN, stop_within_s=0.2), tmp_path, heard) as child:
        await until(lambda: "up" in child.log.read_text())
        pid = child.pid
        assert pid is not None
        await child.stop()
        assert not is_alive(pid)
    assert heard.events == ["did not stop within 0 s; killed"]


async def test_what_a_program_started_dies_with_it(tmp_path: Path) -> None:
    async with running(program(HAS_A_CHILD), tmp_path) as child:
        await until(lambda: child.log.exists() and child.log.read_text().strip())
        grandchild = int(child.log.read_text())
        assert is_alive(grandchild)
        child.kill()
        await until(lambda: not is_alive(grandchild))


async def test_a_program_that_dies_at_start_is_given_up_and_its_log_is_shown(tmp_path: Path) -> None:
    async with running(program("raise SystemExit('no such model')", is_ready=False), tmp_path) as child:
        with pytest.raises(Unavailable, match="keeps dying at start") as failed:
            await child.until_ready()
        assert "no such model" in failed.value.message


async def test_a_program_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    async with running(program(STAYS, is_ready=False, ready_within_s=0.1), tmp_path) as child:
        with pytest.raises(Unavailable, match="not ready within"):
            await child.until_ready()


async def test_an_outage_ends_with_a_new_process(tmp_path: Path) -> None:
    heard = Heard()
    async with running(program(STAYS), tmp_path, heard) as child:
        await child.until_ready()
        first = child.pid
        assert first is not None
        async with asyncio.TaskGroup() as tasks:
            outage = tasks.create_task(child.outage(for_s=0.5))
            await until(lambda: not is_alive(first))
            assert child.pid is None
            await outage
        assert child.pid not in (None, first)
        assert heard.events == []


def test_a_program_dies_with_its_supervisor(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    held = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(99)"
    leash = f"[sys.executable, '-I', '-S', {str(LEASH)!r}, str(os.getpid()), sys.executable, '-c', {held!r}]"
    supervisor = f"import os, subprocess, sys, time; subprocess.Popen({leash}); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", supervisor]) as parent:
        asyncio.run(until(lambda: note.exists() and note.read_text().endswith(".")))
        pid = int(note.read_text().rstrip("."))
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
    asyncio.run(until(lambda: not is_alive(pid)))


def test_a_leash_whose_holder_is_gone_starts_nothing(tmp_path: Path) -> None:
    note = tmp_path / "ran"
    code = f"open({str(note)!r}, 'w')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(LEASH), str(os.getppid()), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "parent is gone" in done.stderr
    assert not note.exists()


def test_the_end_of_a_log_is_shown_as_a_person_reads_it(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    trace = "Traceback:\n  File x\n    | KeyError: 'model'\n    +----"
    log.write_text("plain words\n" + json.dumps({"level": "error", "message": "died", "exception": trace}) + "\n")
    assert tail(log) == "  plain words\n  error: died\n    Traceback:\n    File x\n    KeyError: 'model'"
    assert tail(tmp_path / "none") == "(no log)"


async def test_an_end_is_at_once_and_for_good(tmp_path: Path) -> None:
    heard = Heard()
    async with running(program(STUBBORN), tmp_path, heard) as child:
        await until(lambda: "up" in tail(child.log))
        child.end()
        await child.stop()
        assert child.pid is None
    assert not heard.events
