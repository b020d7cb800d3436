"""Waiting in async tests: on a condition, with a deadline that says what did not happen."""

import asyncio
from collections.abc import Awaitable, Callable


async def eventually(is_true: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 10.0) -> None:
    """Return as soon as `is_true()`; raise when it is not within `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        result = is_true()
        if await result if isinstance(result, Awaitable) else result:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        await asyncio.sleep(0.01)
