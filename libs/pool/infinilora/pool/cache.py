"""The local disk tier: whole packed files under the names of their digests, at most so many bytes of them.

All processes of a host may share a directory. The directory is the only book that is kept:

    <sha256>.safetensors      whole; whoever reads it holds a shared lock on it, so that nobody removes it
    <sha256>.<random>.part    on its way, as long as it will be; its writer holds the lock until it is renamed
    lock                      held while room is made and while files come to be, for a few system calls

Locks are the kernel's (flock) and end with their process, so a file that is half written and not locked is a dead
writer's, and goes. A file becomes whole by fsync and rename, and the directory is synced after it. The least recently
used (opened) goes first, never one that is open. Bytes are not trusted: whoever reads them verifies, and calls `drop`
when they are wrong. A directory that cannot be written, or a full disk, is a cache that is off; that is said once.
Thread-safe.
"""

import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from infinilora.protocol.ids import Digest

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_SCRATCH = ".part"
LOCK_TRIES, LOCK_PAUSE_S = 50, 0.01
"""The directory's lock is held for moments; a process that is stopped while it holds it costs us the cache, no more."""


class CachedFile:
    """A file of the cache, open for reading; it is not removed to make room before `close`."""

    def __init__(self, digest: Digest, fd: int) -> None:
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


class CacheWriter:
    """A file on its way into the cache. Writes never fail the caller: a disk error only ends the attempt."""

    def __init__(self, cache: "DiskCache", digest: Digest, fd: int, scratch: Path) -> None:
        self._cache = cache
        self._digest = digest
        self._scratch = scratch
        self._fd: int | None = fd

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if self._fd is None:
            return
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, memoryview(data)[done:], offset + done)
        except OSError as error:
            self._cache.is_off(error)
            self.abandon()

    def commit(self) -> None:
        """Every byte has been written: the file becomes the cache's. Does nothing if it was forgotten meanwhile."""
        if self._fd is None:
            return
        try:
            _mark_used(self._fd)
            os.fsync(self._fd)
            # Shared from here on: not to be swept as a dead writer's, and open to readers once it has its name.
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._scratch.rename(self._cache.path(self._digest))
            self._cache.sync()
        except FileNotFoundError:
            self.abandon()
        except OSError as error:
            self._cache.is_off(error)
            self.abandon()
        else:
            self._close()
            self._cache.is_on()

    def abandon(self) -> None:
        """Forget what was written. Harmless after `commit`."""
        if self._fd is not None:
            with suppress(OSError):
                self._scratch.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None


class _File(NamedTuple):
    path: Path
    num_bytes: int
    used_ns: int


class DiskCache:
    """Knows nothing between calls but its directory and its cap."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._is_said_off = False
        if max_bytes == 0:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._make_room(0)
        except OSError as error:
            self.is_off(error)

    def path(self, digest: Digest) -> Path:
        return self._directory / f"{_hex(digest)}{_SUFFIX}"

    def names(self) -> list[Digest]:
        """What whole files are called, the least recently used first."""
        return [_digest(file.path) for file in self._files() if file.path.suffix == _SUFFIX]

    def open(self, digest: Digest, *, is_use: bool = True) -> CachedFile | None:
        """The digest's file; None if it is not here. Now the most recently used, if this is a use."""
        if self._max_bytes == 0:
            return None
        try:
            fd = os.open(self.path(digest), os.O_RDONLY)
        except OSError:
            return None
        try:
            # Refused only while somebody removes it.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        if is_use:
            _mark_used(fd)
        return CachedFile(digest, fd)

    def writer(self, digest: Digest, num_bytes: int) -> CacheWriter | None:
        """Make room for a file and begin it; None if it is here or on its way, or there is no room to be made."""
        if num_bytes > self._max_bytes:
            return None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)  # somebody may have cleaned up
            with self._locked():
                if self.path(digest).exists() or not self._make_room(num_bytes) or self._on_the_way(digest):
                    return None
                return self._begin(digest, num_bytes)
        except OSError as error:
            self.is_off(error)
            return None

    def drop(self, digest: Digest) -> None:
        """Its bytes are wrong: the next `open` finds nothing."""
        with suppress(OSError):
            self.path(digest).unlink(missing_ok=True)

    def forget(self, digest: Digest) -> bool:
        """Nobody will ask for it again: remove its file, and one on its way. False if there was nothing, or no right.

        Whoever reads it now goes on reading it.
        """
        found = False
        try:
            with self._locked():
                for path in (self.path(digest), *self._on_the_way(digest)):
                    with suppress(FileNotFoundError):
                        path.unlink()
                        found = True
                self.sync()
        except FileNotFoundError:  # there is no directory
            return False
        except OSError as error:
            logger.warning("cache file not removed", extra={"adapter_id": digest, "reason": str(error)})
        return found

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those on their way at their full length."""
        return sum(file.num_bytes for file in self._files())

    def is_off(self, error: OSError) -> None:
        """Something could not be written. What is cached is read on; the rest comes from the store."""
        with self._lock:
            if self._is_said_off:
                return
            self._is_said_off = True
        logger.warning(
            "disk cache is off; adapters come from the store",
            extra={"path": str(self._directory), "reason": str(error)},
        )

    def is_on(self) -> None:
        """Something was written: the next time that it cannot be is worth a word again."""
        with self._lock:
            self._is_said_off = False

    def sync(self) -> None:
        """What the directory says of its files outlives a loss of power."""
        fd = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def check(self) -> None:
        """Raise AssertionError unless the cap holds, and nothing is open or being written, by any process."""
        files = self._files()
        assert sum(file.num_bytes for file in files) <= self._max_bytes, files
        for file in files:
            assert file.path.suffix == _SUFFIX, f"{file.path} is being written, or its writer died"
            with _held(file.path) as is_held:
                assert is_held, f"{file.path} is open"

    def _on_the_way(self, digest: Digest) -> list[Path]:
        return list(self._directory.glob(f"{_hex(digest)}.*{_SCRATCH}"))

    def _begin(self, digest: Digest, num_bytes: int) -> CacheWriter:
        scratch = self._directory / f"{_hex(digest)}.{secrets.token_hex(4)}{_SCRATCH}"
        fd = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its length tells the other processes what room it will take.
            os.ftruncate(fd, num_bytes)
        except OSError:
            os.close(fd)
            scratch.unlink()
            raise
        return CacheWriter(self, digest, fd, scratch)

    def _files(self) -> list[_File]:
        """Whole files and those on their way, the least recently used first."""
        found = []
        with suppress(OSError), os.scandir(self._directory) as entries:  # no directory, or not ours: nothing to count
            for entry in entries:
                if entry.name.endswith((_SUFFIX, _SCRATCH)):
                    with suppress(FileNotFoundError):  # gone since
                        info = entry.stat()
                        found.append(_File(Path(entry.path), info.st_size, info.st_mtime_ns))
        return sorted(found, key=lambda file: file.used_ns)

    def _make_room(self, num_bytes: int) -> bool:
        """Remove what dead writers left, and as many files as it takes. Under the directory's lock."""
        files = sorted(self._files(), key=lambda file: file.path.suffix != _SCRATCH)
        used = sum(file.num_bytes for file in files)
        for file in files:
            if file.path.suffix != _SCRATCH and used + num_bytes <= self._max_bytes:
                break
            with _held(file.path) as is_held:
                if is_held:
                    file.path.unlink(missing_ok=True)
                    used -= file.num_bytes
        return used + num_bytes <= self._max_bytes

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the directory's lock. Raises OSError where there is none to be had."""
        fd = os.open(self._directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            _wait_for(fd)
            yield
        finally:
            os.close(fd)


def _mark_used(fd: int) -> None:
    """Now, to the nanosecond: what the file system itself would write is the time of its latest tick."""
    now_ns = time.time_ns()
    with suppress(OSError):  # a directory that cannot be written is still read
        os.utime(fd, ns=(now_ns, now_ns))


def _hex(digest: Digest) -> str:
    return digest.removeprefix("sha256:")


def _digest(path: Path) -> Digest:
    return Digest(f"sha256:{path.stem}")


def _wait_for(fd: int) -> None:
    for _ in range(LOCK_TRIES):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
    raise OSError(errno.EBUSY, "another process keeps the cache's lock")


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Whether nobody reads or writes the file, and nobody will within the block."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:  # gone since, or not ours
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)
