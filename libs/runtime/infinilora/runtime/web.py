"""An ASGI application served as part of a service: its signals, its tasks, a port known before it serves."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from typing_extensions import override

from infinilora.runtime.listening import listen_on


class WebServer:
    """Listens from `with` on; answers while `run` runs. Port 0 takes a free one."""

    def __init__(self, app: Any, listen: str, *, grace_s: float) -> None:
        self._socket, self.address = listen_on(listen)
        self._ended = asyncio.Event()
        self._server = _Uvicorn(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=round(grace_s)
            )
        )

    def __enter__(self) -> "WebServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def run(self) -> None:
        """Serve until `stop`."""
        try:
            await self._server.serve([self._socket])
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Take no new connection, give answers under way `grace_s`, return when `run` has."""
        self._server.should_exit = True
        await self._ended.wait()


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own: signals are the service's."""

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield
