"""Adapter files to a packed file, in a process of its own with limits on memory and time.

Whatever a file does to the reader happens over there: here it is an exit status and a line of JSON.
"""

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from infinilora.gateway import confine
from infinilora.protocol.adapter import BaseCard, Manifest
from infinilora.protocol.errors import AdapterInvalid, DeadlineExceeded, Internal, WireError, from_wire
from infinilora.protocol.ids import Digest

logger = logging.getLogger(__name__)

LOG_CHARS = 2000


class IngestLimits(NamedTuple):
    """What one ingest may use: address space, processor seconds, wall-clock seconds."""

    memory_mb: int = 8192
    cpu_s: int = 300
    wall_s: float = 600.0


class Packed(msgspec.Struct, frozen=True):
    """The worker's good news: what it has written."""

    manifest: Manifest
    digest: Digest


class _Report(msgspec.Struct, frozen=True):
    manifest: Manifest | None = None
    digest: Digest | None = None
    error: WireError | None = None


async def pack_adapter(source: Path, card: BaseCard, work: Path, limits: IngestLimits) -> tuple[Packed, Path]:
    """Pack the adapter in `source` for the base of `card`; the file is made in `work`.

    Raises AdapterInvalid for an adapter that cannot be served exactly, with the worker's own words.
    """
    card_file, out = work / "card.json", work / "packed.safetensors"
    await asyncio.to_thread(card_file.write_bytes, msgspec.json.encode(card))
    worker = ("-m", "infinilora.weights.ingest", "--source", source, "--card", card_file, "--out", out)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-IS", confine.__file__, str(limits.memory_mb), str(limits.cpu_s)),
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
        raise DeadlineExceeded(f"reading the adapter took more than {limits.wall_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _read_report(process.returncode or 0, stdout, stderr, source), out


def _environment() -> dict[str, str]:
    """Nothing of ours: the worker needs no address and no secret."""
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "LC_ALL": "C.UTF-8"}


def _read_report(status: int, stdout: bytes, stderr: bytes, source: Path) -> Packed:
    try:
        report = msgspec.json.decode(stdout, type=_Report)
    except msgspec.DecodeError:
        report = _Report()
    if report.error is not None:
        error = from_wire(report.error)
        error.message = error.message.replace(f"{source}/", "").replace(str(source), "the adapter")
        raise error
    if status == 0 and report.manifest is not None and report.digest is not None:
        return Packed(report.manifest, report.digest)
    logger.error("ingest died", extra={"status": status, "stderr": stderr.decode(errors="replace")[-LOG_CHARS:]})
    if status in (-signal.SIGXCPU, -signal.SIGKILL) or b"MemoryError" in stderr:
        raise AdapterInvalid("the adapter needs more memory or time to read than this gateway allows")
    raise Internal("reading the adapter failed; the gateway's log has the reason")
