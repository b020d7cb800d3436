"""The life of a process: start, ready, draining, stop; and exit when any part of it dies.

    async def main(service: Service) -> None:
        async with NatsBus(...) as bus:
            service.spawn(serve(bus), "serve")
            service.ready()
            await service.draining.wait()        # SIGTERM or SIGINT
            ...                                  # finish what runs

    run("engine", main)

`main` returns when the process has nothing left to do; spawned tasks are then cancelled. A task that dies
takes the process with it: traceback in the log, status 1. After a stop is asked for `main` has `drain_s`
seconds, a second signal cuts them short; a process that cannot even be cancelled is ended by a watchdog.
"""

import asyncio
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from infinilora.protocol.control import ProcessState

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Python's default of 5 ms would add 5 ms to each hand-over between the step thread and the loop."""
WATCHDOG_S = 5.0
"""What clean-up may take once everything has been cancelled."""


class Service:
    """What `main` holds of its process. `state` only ever moves forward."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self.state: ProcessState = "starting"
        self.draining = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread_death: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    def ready(self) -> None:
        if self.state == "starting":
            self.state = "ready"
            logger.info("ready")

    def drain(self) -> None:
        """Ask `main` to finish. Harmless when repeated."""
        if not self.draining.is_set():
            self.state = self.state if self.state == "stuck" else "draining"
            logger.info("draining")
            self.draining.set()

    def stuck(self) -> None:
        """It cannot be trusted with work any more: what beats say until the watchdog ends it. Any thread."""
        self.state = "stuck"

    def told(self, *, is_draining: bool) -> ProcessState:
        """The state for a beat, of a process that a command may drain while it serves."""
        return "draining" if is_draining and self.state == "ready" else self.state

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a task whose death is the death of the process."""
        task = self._group.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def fail_threadsafe(self, error: BaseException) -> None:
        """For threads of our own: report the error that ended them, and end the process."""
        self._loop.call_soon_threadsafe(self._fail, error)

    async def live(self, main: Callable[["Service"], Awaitable[None]], drain_s: float) -> None:
        """Run `main` and all it spawns to the end. Raises what killed one of them."""
        async with self._group:
            body = self._group.create_task(_call(main, self), name="main")
            self.spawn(self._limit_drain(body, drain_s), "drain limit")
            self.spawn(_wait(self._thread_death), "threads")
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._on_signal, body)
            try:
                await asyncio.wait([body])
            finally:
                _watch_the_end()
                # A TaskGroup waits for its tasks; those that serve for ever would keep it for ever.
                for task in self._tasks:
                    task.cancel()

    def _fail(self, error: BaseException) -> None:
        if not self._thread_death.done():
            self._thread_death.set_exception(error)

    def _on_signal(self, body: asyncio.Task[None]) -> None:
        if self.draining.is_set():
            _cut_short(body)
        self.drain()

    async def _limit_drain(self, body: asyncio.Task[None], drain_s: float) -> None:
        await self.draining.wait()
        await asyncio.wait([body], timeout=drain_s)
        if not body.done():
            logger.warning("drain cut short", extra={"drain_s": drain_s})
            _cut_short(body)


def run(name: str, main: Callable[[Service], Awaitable[None]], *, drain_s: float = 10.0) -> NoReturn:
    """Run a service as this process. Exits 0 after an orderly stop and 1 when something died."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    status = 0
    try:
        asyncio.run(_live(name, main, drain_s))
    except BaseException:  # the one broad except: whatever ended the process is logged, then it ends
        logger.exception("died")
        status = 1
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit: a thread stuck in a call of ours or of a library must not keep a finished process.
    os._exit(status)


async def _live(name: str, main: Callable[[Service], Awaitable[None]], drain_s: float) -> None:
    await Service(name).live(main, drain_s)


def _cut_short(body: asyncio.Task[None]) -> None:
    body.cancel()
    _watch_the_end()


def _watch_the_end() -> None:
    """From here on only clean-up is left, and a task that cannot be cancelled must not keep the process."""
    watchdog = threading.Timer(WATCHDOG_S, _give_up)
    watchdog.daemon = True
    watchdog.start()


def _give_up() -> None:
    logger.error("clean-up hangs; exiting", extra={"watchdog_s": WATCHDOG_S})
    os._exit(1)


async def _call(main: Callable[[Service], Awaitable[None]], service: Service) -> None:
    await main(service)


async def _wait(future: asyncio.Future[None]) -> None:
    await future
