"""The engine's second door: `BaseFacts.Answer` over gRPC. Takes one caller at a time, off the step thread.

Owns the asyncio side and a thread that gives way to every other; what is answered is `facts`.
"""

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from infinilora.engine.facts import Facts
from infinilora.protocol import generate_pb2 as pb
from infinilora.protocol.errors import DeadlineExceeded, Overloaded, TooLarge, Unavailable
from infinilora.runtime.rpc import Call

SERVICE = pb.DESCRIPTOR.services_by_name["BaseFacts"]

PIECE_BYTES = 1 << 20
MAX_WAITING = 8
"""Callers that may wait for their turn; more are sent to another engine."""
LONGEST_S = 1800.0
"""One caller's whole stay, whatever it allows itself."""
_NICENESS, _LEAST = 10, 19


class FactsDesk:
    """Implements the service. Between calls: no file, no work; `close` ends the thread."""

    def __init__(self, facts: Facts, *, max_bytes: int, directory: Path) -> None:
        """`max_bytes` of a request, and of its answer; the request lies in `directory` while it is answered."""
        self._facts = facts
        self._max_bytes = max_bytes
        self._directory = directory
        self._turn = asyncio.Lock()
        self._num_here = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="facts", initializer=_give_way)

    async def answer(self, pieces: AsyncIterator[Any], call: Call) -> AsyncGenerator[Any, None]:
        """The answer to one request, in pieces."""
        left_s = call.time_left_s()
        try:
            async with asyncio.timeout(LONGEST_S if left_s is None else min(left_s, LONGEST_S)):
                if self._num_here > MAX_WAITING:
                    async for _ in pieces:  # a caller who still writes would not hear why
                        pass
                    raise Overloaded("too many wait for facts of this base; ask another engine", retry_after_s=2.0)
                answer = await self._in_turn(pieces)
        except TimeoutError:
            raise DeadlineExceeded("the facts were not asked for, or not found, in time") from None
        for start in range(0, len(answer), PIECE_BYTES):
            yield pb.FilePiece(data=answer[start : start + PIECE_BYTES])

    async def _in_turn(self, pieces: AsyncIterator[Any]) -> bytes:
        self._num_here += 1
        try:
            async with self._turn:
                return await self._answer(pieces)
        finally:
            self._num_here -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, pieces: AsyncIterator[Any]) -> bytes:
        loop = asyncio.get_running_loop()
        with _disk_errors():
            file = self._open()
        with file:
            await self._receive(pieces, file)
            # By its descriptor: the file has no name, and goes with the process however that ends.
            questions = await loop.run_in_executor(
                self._thread, self._facts.read, Path(f"/proc/self/fd/{file.fileno()}")
            )
            answers, num_bytes = {}, 0
            for name, question in questions.items():  # a caller that goes away is heard of between two
                answers[name] = await loop.run_in_executor(self._thread, self._facts.answer, question)
                num_bytes += sum(tensor.nbytes for tensor in answers[name].values())
                self._check_size("answered", num_bytes)
            return await loop.run_in_executor(self._thread, self._facts.file, questions, answers)

    def _check_size(self, what: str, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise TooLarge(
                f"what is {what} of the base model is more than {self._max_bytes} bytes (INFINILORA_FACTS_MB)"
            )

    def _open(self) -> IO[bytes]:
        self._directory.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._directory)

    async def _receive(self, pieces: AsyncIterator[Any], file: IO[bytes]) -> None:
        loop, num_bytes = asyncio.get_running_loop(), 0
        async for piece in pieces:
            num_bytes += len(piece.data)
            self._check_size("asked", num_bytes)
            with _disk_errors():
                await loop.run_in_executor(self._thread, file.write, piece.data)
        with _disk_errors():
            await loop.run_in_executor(self._thread, file.flush)


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"this engine's disk does not take a question about its weights: {error.strerror}") from error


def _give_way() -> None:
    """Serving comes first: on Linux niceness is a thread's own."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(_LEAST, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS))
