"""The local disk tier: whole packed files under the names of their digests, at most so many bytes of them.

A file is there whole or not at all (scratch file, fsync, rename). The least recently used go first, never one that is
open. Bytes are not trusted: whoever reads them verifies, and calls `drop` when they are wrong. One process owns a
directory. Thread-safe.
"""

import fcntl
import logging
import os
import secrets
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType

from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import Digest

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_SCRATCH = ".part"


class CachedFile:
    """A file of the cache, open for reading; it is not removed before `close`."""

    def __init__(self, cache: "DiskCache", digest: Digest, fd: int) -> None:
        self._cache = cache
        self._digest = digest
        self._fd = fd

    def read_into(self, offset: int, target: memoryview) -> bool:
        """Fill `target` from `offset`; False when the file is too short or cannot be read."""
        done = 0
        try:
            while done < len(target):
                count = os.preadv(self._fd, [target[done:]], offset + done)
                if count == 0:
                    return False
                done += count
        except OSError as error:
            logger.warning("cache file unreadable", extra={"adapter_id": self._digest, "reason": str(error)})
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)
        self._cache.closed(self._digest)


class CacheWriter:
    """A file on its way into the cache. Writes never fail the caller: a disk error only ends the attempt."""

    def __init__(self, cache: "DiskCache", digest: Digest, num_bytes: int, scratch: Path) -> None:
        self._cache = cache
        self._digest = digest
        self._num_bytes = num_bytes
        self._scratch = scratch
        self._fd: int | None = None
        self._try_open()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if self._fd is None:
            return
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, memoryview(data)[done:], offset + done)
        except OSError as error:
            self._give_up(error)

    def commit(self) -> None:
        """Every byte has been written: the file becomes the cache's."""
        if self._fd is None:
            return
        try:
            os.fsync(self._fd)
            self._scratch.rename(self._cache.path(self._digest))
        except OSError as error:
            self._give_up(error)
            return
        os.close(self._fd)
        self._fd = None
        self._cache.committed(self._digest, self._num_bytes)

    def abandon(self) -> None:
        """Forget what was written. Harmless after `commit`."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._scratch.unlink(missing_ok=True)
            self._cache.abandoned(self._num_bytes)

    def _try_open(self) -> None:
        try:
            self._fd = os.open(self._scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as error:
            logger.warning("cache not written", extra={"adapter_id": self._digest, "reason": str(error)})
            self._cache.abandoned(self._num_bytes)

    def _give_up(self, error: OSError) -> None:
        logger.warning("cache not written", extra={"adapter_id": self._digest, "reason": str(error)})
        self.abandon()


class DiskCache:
    """`_sizes` is in order of use, the next to go first; it, the reservations of writers and the files agree."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._open: Counter[Digest] = Counter()
        self._reserved_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)
        self._owner = _own(directory)
        for left_over in directory.glob(f"*{_SCRATCH}"):
            left_over.unlink(missing_ok=True)
        files = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda p: p.stat().st_mtime)
        self._sizes = {Digest(f"sha256:{p.name.removesuffix(_SUFFIX)}"): p.stat().st_size for p in files}
        with self._lock:
            self._make_room(0)

    def path(self, digest: Digest) -> Path:
        return self._directory / f"{digest.removeprefix('sha256:')}{_SUFFIX}"

    def open(self, digest: Digest) -> CachedFile | None:
        """The digest's file, now the most recently used; None if it is not here."""
        with self._lock:
            if digest not in self._sizes:
                return None
            try:
                fd = os.open(self.path(digest), os.O_RDONLY)
                os.utime(fd)
            except OSError:
                del self._sizes[digest]
                return None
            self._sizes[digest] = self._sizes.pop(digest)
            self._open[digest] += 1
        return CachedFile(self, digest, fd)

    def writer(self, digest: Digest, num_bytes: int) -> CacheWriter | None:
        """Make room for a file and begin it; None if it is here already or there is no room to be made."""
        with self._lock:
            if digest in self._sizes or not self._make_room(num_bytes):
                return None
            self._reserved_bytes += num_bytes
        name = f"{digest.removeprefix('sha256:')}.{secrets.token_hex(4)}{_SCRATCH}"
        return CacheWriter(self, digest, num_bytes, self._directory / name)

    def drop(self, digest: Digest) -> None:
        """Its bytes are wrong: the next `open` finds nothing."""
        with self._lock:
            if self._sizes.pop(digest, None) is not None:
                self.path(digest).unlink(missing_ok=True)

    def committed(self, digest: Digest, num_bytes: int) -> None:
        """For writers: the file is in its place."""
        with self._lock:
            self._reserved_bytes -= num_bytes
            self._sizes[digest] = num_bytes

    def abandoned(self, num_bytes: int) -> None:
        """For writers: the room that was made is not needed."""
        with self._lock:
            self._reserved_bytes -= num_bytes

    def closed(self, digest: Digest) -> None:
        """For readers: one reader less."""
        with self._lock:
            self._open[digest] -= 1
            if not self._open[digest]:
                del self._open[digest]

    def close(self) -> None:
        """Let another process own the directory."""
        os.close(self._owner)

    def check(self) -> None:
        """Raise AssertionError unless nothing is open or being written, and the books match the directory."""
        with self._lock:
            assert not self._open, dict(self._open)
            assert self._reserved_bytes == 0, self._reserved_bytes
            assert sum(self._sizes.values()) <= self._max_bytes
            found = {p.name for p in self._directory.glob(f"*{_SUFFIX}")}
            assert found == {self.path(d).name for d in self._sizes}

    def _make_room(self, num_bytes: int) -> bool:
        def excess() -> int:
            return sum(self._sizes.values()) + self._reserved_bytes + num_bytes - self._max_bytes

        for digest in list(self._sizes):
            if excess() <= 0:
                break
            if not self._open[digest]:
                self.path(digest).unlink(missing_ok=True)
                del self._sizes[digest]
        return excess() <= 0

    def __enter__(self) -> "DiskCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _own(directory: Path) -> int:
    """Hold the directory's lock file. Released by the kernel when the process dies."""
    fd = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise InvalidRequest(
            f"cache directory {directory} is owned by another running process; give each its own"
        ) from None
    return fd
