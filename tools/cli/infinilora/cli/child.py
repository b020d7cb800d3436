"""One program kept running: started, watched, started again after a death with a growing pause, stopped.

Works by callbacks of the running event loop (a pidfd becomes readable when its process ends), so it holds no
task that could be forgotten. Knows nothing of what the program is for.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infinilora.protocol.errors import Unavailable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
LONG_LIFE_S = 20.0
"""A program that lived this long starts again after the first pause."""
HOPELESS_DEATHS = 3
"""So many deaths before the first readiness, and whoever waits for that is told that it will not come."""
POLL_S = 0.05
LEASH = Path(__file__).with_name("leash.py")

Probe = Callable[[], Awaitable[bool]]


@dataclass(frozen=True)
class Program:
    """What to run. `is_ready` may be asked at any time and never raises; `env` is the whole environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    is_ready: Probe
    ready_within_s: float = 60.0
    stop_within_s: float = 15.0


class Child:
    """A program's living process, or the pause before its next one. All methods belong to one event loop."""

    def __init__(self, program: Program, log: Path, on_event: Callable[[str, str], None]) -> None:
        self.program = program
        self.log = log
        self._on_event = on_event
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._born = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None
        self._wanted = False
        self._held = False
        self._deaths = 0
        self._was_ready = False
        self._gone = asyncio.Event()
        self._gone.set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        self._wanted = True
        self._spawn()

    async def until_ready(self) -> None:
        """Return once the program says it is ready. Raises Unavailable, with the end of its log."""
        name = self.program.name
        deadline = time.perf_counter() + self.program.ready_within_s
        while not (self._process and await self.program.is_ready()):
            if self._deaths >= HOPELESS_DEATHS and not self._was_ready:
                raise Unavailable(f"{name} keeps dying at start; the end of {self.log}:\n{tail(self.log)}")
            if time.perf_counter() > deadline:
                waited = f"{name} was not ready within {self.program.ready_within_s:.0f} s"
                raise Unavailable(f"{waited}; the end of {self.log}:\n{tail(self.log)}")
            await asyncio.sleep(POLL_S)
        self._was_ready = True

    def kill(self) -> None:
        """End the process as a crash would; it starts again after the pause."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """End the process at once and for good; `stop` still tells when it is gone."""
        self._wanted = False
        self._signal(signal.SIGKILL)

    async def outage(self, for_s: float) -> None:
        """Kill the process and keep it away for a time; return when it is ready again."""
        self._held = True
        try:
            self.kill()
            await self._gone.wait()
            await asyncio.sleep(for_s)
        finally:
            self._held = False
        if self._wanted:
            self._spawn()
            await self.until_ready()

    async def stop(self) -> None:
        """Ask the process to end, insist after `stop_within_s`, and return when it and its group are gone."""
        self._wanted = False
        if self._timer:
            self._timer.cancel()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.program.stop_within_s):
                await self._gone.wait()
        except TimeoutError:
            self._on_event(self.program.name, f"did not stop within {self.program.stop_within_s:.0f} s; killed")
        finally:
            self._signal(signal.SIGKILL)
        await self._gone.wait()

    def _spawn(self) -> None:
        if self._process or not self._wanted or self._held:
            return
        command = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *self.program.argv]
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the supervisor, which stops all in order.
            self._process = subprocess.Popen(  # noqa: S603 - our own programs
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.program.env),
                start_new_session=True,
            )
        self._born = time.perf_counter()
        self._gone.clear()
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        process = self._process
        assert process is not None  # noqa: S101 - the reader is removed with the process
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _signal_group(process.pid, signal.SIGKILL)  # what it started goes with it; before the pid can be reused
        status = process.wait()
        self._process = None
        self._gone.set()
        if not self._wanted or self._held:
            return
        self._deaths += 1
        if time.perf_counter() - self._born > LONG_LIFE_S:
            self._pause_s = FIRST_PAUSE_S
        self._on_event(self.program.name, f"{_how(status)}; starting it again in {self._pause_s:.1f} s")
        self._timer = loop.call_later(self._pause_s, self._spawn_again)
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    def _spawn_again(self) -> None:
        """A full disk or process table must not end the watch."""
        try:
            self._spawn()
        except OSError as error:
            self._on_event(self.program.name, f"could not be started: {error}; trying again in {self._pause_s:.1f} s")
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._spawn_again)
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    def _signal(self, number: signal.Signals) -> None:
        if not self._process:
            return
        if number == signal.SIGKILL:
            _signal_group(self._process.pid, number)
        else:
            self._process.send_signal(number)  # its own children are its own to stop


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return  # nobody of the group is left


def _how(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def tail(path: Path, num_lines: int = 6) -> str:
    """The last lines of a log as a person reads them, or a word that there are none."""
    if not path.is_file():
        return "(no log)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65_536))
        lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
    return "\n".join(_readable(line) for line in lines) or "(empty)"


def _readable(line: str) -> str:
    """Our services log JSON: the level, the message, and the last lines of an exception are enough here."""
    try:
        record = json.loads(line)
        words = f"  {record['level']}: {record['message']}"
    except (ValueError, KeyError, TypeError):
        return f"  {line}"
    trace = [part.strip(" |+-") for part in str(record.get("exception", "")).splitlines()]
    return "\n    ".join([words, *[part for part in trace if part][-3:]])
