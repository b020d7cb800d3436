"""Where this process puts files down for a while: a directory of its own, and no other's leavings.

A lock beside each directory says that its owner lives; the kernel lets go of it however the owner ends. Knows
nothing of what is put there.
"""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from infinilora.protocol.errors import StoreFull, Unavailable

logger = logging.getLogger(__name__)


@contextmanager
def use_scratch(directory: Path) -> Iterator[None]:
    """Empty it, hold it, and let uploads wait there while they come in: /tmp may be memory, and small.

    Also removes what dead processes have left in the directories beside it.
    """
    held = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        held = _hold(_lock_of(directory))
        if held is not None:
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(exist_ok=True)
    except OSError as error:
        logger.warning("no scratch directory; uploads wait in the system's", extra={"reason": str(error)})
    else:
        tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        if held is not None:
            held.close()


@contextmanager
def disk_errors() -> Iterator[None]:
    """A disk that is full or broken is said to be, and is not the caller's fault."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull("no room on this gateway's disk for the adapter's files", retry_after_s=5.0) from error
        raise Unavailable(f"this gateway's disk does not work: {error.strerror}", retry_after_s=5.0) from error


def _lock_of(directory: Path) -> Path:
    return directory.with_name(directory.name + ".lock")


def _sweep(own: Path) -> None:
    for lock in own.parent.glob("*.lock"):
        directory = lock.with_name(lock.name.removesuffix(".lock"))
        if directory != own and (held := _hold(lock)) is not None:
            shutil.rmtree(directory, ignore_errors=True)
            lock.unlink(missing_ok=True)
            held.close()


def _hold(lock: Path) -> IO[bytes] | None:
    """The lock, held until it is closed; None if another process has it."""
    while True:
        file = lock.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        # Whoever sweeps may have taken the name away between our two calls: then nobody else would see our lock.
        if lock.exists() and os.fstat(file.fileno()).st_ino == lock.stat().st_ino:
            return file
        file.close()
