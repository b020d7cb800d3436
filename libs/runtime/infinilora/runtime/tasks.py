"""Background tasks of an object that is used inside `async with`: they end with it, and their death is heard."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any


class Tasks:
    """A TaskGroup as an attribute. A task that dies cancels the block; an error of the block's own stays itself."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    async def open(self) -> None:
        """The task that calls this is the one that is cancelled when one of ours dies."""
        await self._group.__aenter__()

    def spawn(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Start a task, or nothing (None) when the block is being left."""
        if self._is_closing:
            coro.close()
            return None
        task = self._group.create_task(coro)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what runs and wait for it. Raises what a task died of."""
        self._is_closing = True
        for task in self._running:
            task.cancel()
        if isinstance(error, asyncio.CancelledError):
            await self._group.__aexit__(kind, error, trace)
        else:
            # Not handed to the group: it would come out wrapped in an ExceptionGroup.
            await self._group.__aexit__(None, None, None)
