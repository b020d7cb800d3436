"""Adapter files to a packed file, in a process of its own with limits on memory and time.

Whatever a file does to the reader happens over there: here it is an exit status and a line of JSON.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from infinilora.gateway import confine
from infinilora.gateway.scratch import disk_errors
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import (
    AdapterInvalid,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Unavailable,
    WireError,
    from_wire,
)
from infinilora.protocol.ingest import ASKS_STATUS, MAX_RANK, FactsNeeded, IngestReport

logger = logging.getLogger(__name__)

LOG_CHARS = 2000
NARROW = ("BF16", "F16")


class IngestLimits(NamedTuple):
    """What one ingest may use (memory, processor and wall-clock seconds) and take (bytes unpacked, rank).

    Files are mapped and read piece by piece: `memory_mb` does not limit how large an adapter may be.
    """

    memory_mb: int = 16 << 10
    cpu_s: int = 600
    wall_s: float = 900.0
    max_bytes: int = 16 << 30
    max_rank: int = MAX_RANK

    @property
    def file_mb(self) -> int:
        """Of the largest file that may be made: an adapter in BF16 may have to be packed as F32."""
        return 2 * (self.max_bytes >> 20) + 64


class _Refusal(msgspec.Struct, frozen=True):
    error: WireError


Ask = Callable[[BaseCard, Path, Path], Awaitable[None]]
"""Has the questions in the first file answered into the second. Raises Unavailable where nobody can."""


async def _ask_nobody(card: BaseCard, _request: Path, _answer: Path) -> None:
    raise Unavailable(f"this adapter needs facts of base model '{card.name}', and there is nobody to ask")


async def pack_adapter(
    source: Path, card: BaseCard, work: Path, limits: IngestLimits, *, narrow: str = "", ask: Ask = _ask_nobody
) -> tuple[IngestReport, Path]:
    """Pack the adapter in `source`, a directory or an archive, for the base of `card`; the file is made in `work`.

    `narrow` names the dtype of 16 bits to round to; empty: none. What the worker must know of the base's weights is
    asked for once. Raises AdapterInvalid for an adapter that cannot be served exactly, with the worker's own words.
    """
    card_file, out = work / "card.json", work / "packed.safetensors"
    request, answer = work / "facts.request", work / "facts.answer"
    with disk_errors():
        await asyncio.to_thread(card_file.write_bytes, msgspec.json.encode(card))
    worker = ["-m", "infinilora.weights.ingest", "--source", source, "--card", card_file, "--out", out]
    worker += ["--max-bytes", limits.max_bytes, "--max-rank", limits.max_rank]
    worker += ["--request", request, *(["--narrow", check_narrow(narrow)] if narrow else [])]
    report = await _work(worker, source, limits)
    if isinstance(report, FactsNeeded):
        await ask(card, request, answer)
        report = await _work([*worker, "--facts", answer], source, limits)
        if isinstance(report, FactsNeeded):
            raise Unavailable("the adapter's files changed while they were read; try again", retry_after_s=1.0)
    return report, out


async def _work(worker: Sequence[object], source: Path, limits: IngestLimits) -> IngestReport | FactsNeeded:
    """One run of the worker, confined."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-IS", confine.__file__, str(os.getpid())),
        *map(str, (limits.memory_mb, limits.cpu_s, limits.file_mb)),
        *(sys.executable, *map(str, worker)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(),
    )
    try:
        async with asyncio.timeout(limits.wall_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise DeadlineExceeded(
            f"reading the adapter took more than {limits.wall_s:g} s (INFINILORA_INGEST_WALL_S)"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _read_report(process.returncode or 0, stdout, stderr, source, limits)


def check_narrow(narrow: str) -> str:
    """The dtype as packed files spell it. Raises InvalidRequest."""
    if narrow.upper() not in NARROW:
        raise InvalidRequest(f"narrow {narrow[:40]!r}: wanted {' or '.join(NARROW)}, or nothing", param="narrow")
    return narrow.upper()


def _environment() -> dict[str, str]:
    """Nothing of ours: the worker needs no address and no secret."""
    kept = {"MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
    # Arrays come and go by the thousand. Given back and fetched anew, their pages cost a third of the self-test.
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "LC_ALL": "C.UTF-8"}


def _read_report(
    status: int, stdout: bytes, stderr: bytes, source: Path, limits: IngestLimits
) -> IngestReport | FactsNeeded:
    report = _decode(stdout)
    if isinstance(report, _Refusal):
        error = from_wire(report.error)
        error.message = error.message.replace(f"{source}/", "").replace(str(source), "the adapter")
        raise error
    if report is not None and status == (ASKS_STATUS if isinstance(report, FactsNeeded) else 0):
        return report
    if status == -signal.SIGBUS:  # a mapped file was cut under the reader
        raise Unavailable("the adapter's files changed while they were read; try again", retry_after_s=1.0)
    logger.error("ingest died", extra={"status": status, "stderr": stderr.decode(errors="replace")[-LOG_CHARS:]})
    if status in (-signal.SIGXCPU, -signal.SIGKILL) or b"MemoryError" in stderr:
        raise AdapterInvalid(
            f"the adapter needs more memory or time to read than is allowed here: {limits.memory_mb} MB and "
            f"{limits.cpu_s} s of a processor (INFINILORA_INGEST_MEMORY_MB, INFINILORA_INGEST_CPU_S)"
        )
    died = Internal("reading the adapter failed; the gateway's log has the reason")
    died.add_note(stderr.decode(errors="replace"))  # for whoever runs this on their own machine
    raise died


def _decode(line: bytes) -> IngestReport | FactsNeeded | _Refusal | None:
    """What the worker said; None if it is nothing whole."""
    kinds: tuple[type[IngestReport | FactsNeeded | _Refusal], ...] = (_Refusal, FactsNeeded, IngestReport)
    for kind in kinds:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=kind)
    return None
