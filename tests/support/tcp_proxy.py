"""A loopback proxy before any TCP server: a test parts two processes, and brings them together again.

async with TcpProxy(server_port) as proxy:
    ...                # 127.0.0.1:proxy.port in place of the server's own address
    proxy.hold()       # nothing goes through, no end either: nobody is told
    proxy.release()
"""

import asyncio
from contextlib import suppress
from typing import Self

HOST = "127.0.0.1"
PIECE_BYTES = 1 << 16


class TcpProxy:
    """Belongs to the event loop that it was entered on. `port` is known from then on."""

    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        self._upstream_port = upstream_port
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def hold(self) -> None:
        """What comes from now on stays here, new connections too."""
        self._passes.clear()

    def release(self) -> None:
        """What stayed goes on, and so do ends of connections."""
        self._passes.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._passes.wait()
            with suppress(OSError):
                from_server, to_server = await asyncio.open_connection(HOST, self._upstream_port)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._carry(reader, to_server))
                    group.create_task(self._carry(from_server, writer))
        finally:
            writer.close()
            self._connections.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(PIECE_BYTES):
                    await self._passes.wait()
                    writer.write(data)
                    await writer.drain()
                await self._passes.wait()
        finally:
            writer.close()
