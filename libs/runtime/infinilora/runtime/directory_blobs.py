"""A directory as a blob store. Writers rename a synced file into place; `link` decides who was first.

What a writer is about to rename lies in a scratch directory under its lock. The kernel lets go of the lock however
the writer ends; what nobody holds, and nobody has touched for a while, is swept away by whoever writes next.
"""

import errno
import fcntl
import io
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from infinilora.protocol.errors import InvalidRequest, StoreFull, StoreRefused, Unavailable
from infinilora.runtime.blob_store import SCRATCH, Blob, Changed, check_object_name

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
ABANDONED_S = 600.0
"""How long nobody has written to a scratch file that is swept. Some shared file systems keep locks to one host."""


class DirectoryBlobs:
    """The files below `root`, under the names of their paths."""

    most_ahead_bytes = 0

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._is_swept = False

    def put_file(self, name: str, path: Path, *, if_absent: bool = False) -> bool:
        with path.open("rb") as source:
            return self._write(name, source, if_absent=if_absent)

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        return self._write(name, io.BytesIO(data), if_absent=if_absent)

    def get(self, name: str, *, etag: str | None = None) -> bytes:
        with _file_errors(name), self._path(name).open("rb") as file:
            return _unchanged(file, etag, file.read)

    def get_range(self, name: str, offset: int, num_bytes: int, *, etag: str | None = None) -> bytes:
        with _file_errors(name), self._path(name).open("rb", buffering=0) as file:
            return _unchanged(file, etag, lambda: _pread(file.fileno(), offset, num_bytes))

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        at = 0
        with _file_errors(name), self._path(name).open("rb", buffering=0) as file:
            while at < len(into) and (got := os.preadv(file.fileno(), [into[at:]], offset + at)):
                at += got
        return at

    def stat(self, name: str) -> Blob | None:
        path = self._path(name)
        try:
            with _file_errors(name):
                info = path.stat()
        except FileNotFoundError:
            return None
        return Blob(info.st_size, _etag(info)) if path.is_file() else None

    def list(self, prefix: str = "") -> list[str]:
        if not self._root.is_dir():
            return []
        files = (p for p in self._root.rglob("*") if p.is_file())
        names = (p.relative_to(self._root).as_posix() for p in files)
        return sorted(n for n in names if n.startswith(prefix) and not n.startswith(SCRATCH + "/"))

    def delete(self, name: str) -> None:
        with _file_errors(name):
            self._path(name).unlink(missing_ok=True)

    def deletion(self, name: str, *, within_s: int) -> Callable[[], None]:
        path, before = self._path(name), self.stat(name)
        deadline = time.monotonic() + within_s

        def delete() -> None:
            if time.monotonic() > deadline:
                raise Unavailable("too late to delete the object", retry_after_s=1.0)
            if before is not None and self.stat(name) == before:
                with _file_errors(name), suppress(FileNotFoundError):
                    self._remove(path, before)

        return delete

    def _remove(self, path: Path, wanted: Blob) -> None:
        """Take the file aside first: one that has come in its place between two system calls goes back."""
        aside = self._scratch()
        with path.open("rb") as file:
            _hold(file)
            path.rename(aside)
            try:
                info = aside.stat()
                if Blob(info.st_size, _etag(info)) != wanted:
                    with suppress(FileExistsError):
                        os.link(aside, path)
            finally:
                aside.unlink()

    def _scratch(self) -> Path:
        """A name for a file on its way, in a directory that exists and holds nothing of the dead."""
        directory = self._root / SCRATCH
        directory.mkdir(parents=True, exist_ok=True)
        if not self._is_swept:
            self._is_swept = True
            for path in directory.iterdir():
                _sweep(path)
        return directory / secrets.token_hex(8)

    def _path(self, name: str) -> Path:
        path = self._root / check_object_name(name)
        # The name cannot climb; a link planted inside the directory could.
        root = os.path.realpath(self._root)
        if os.path.commonpath((os.path.realpath(path), root)) != root:
            raise InvalidRequest(f"object name {name[:80]!r} leads out of the store")
        return path

    def _write(self, name: str, source: IO[bytes], *, if_absent: bool) -> bool:
        target = self._path(name)
        with _file_errors(name, writing=True):
            scratch = self._scratch()
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with scratch.open("xb") as file:
                    _hold(file)
                    while chunk := source.read(1 << 20):
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                    return _place(scratch, target, if_absent=if_absent)
            finally:
                scratch.unlink(missing_ok=True)


def _hold(file: IO[bytes]) -> None:
    """Say that its writer lives. Where a file system knows no locks its age must do."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)


def _sweep(path: Path) -> None:
    """Remove a scratch file that is no living writer's. One of another user's is left."""
    with suppress(OSError), path.open("rb") as file:
        age_s = datetime.now(UTC).timestamp() - os.fstat(file.fileno()).st_ctime
        if age_s > ABANDONED_S:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _place(scratch: Path, target: Path, *, if_absent: bool) -> bool:
    if if_absent:
        try:
            os.link(scratch, target)
        except FileExistsError:
            return False
    else:
        scratch.replace(target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return True


def _pread(fd: int, offset: int, num_bytes: int) -> bytes:
    chunks, at = [], offset
    while at < offset + num_bytes:
        chunk = os.pread(fd, offset + num_bytes - at, at)
        if not chunk:
            break
        chunks.append(chunk)
        at += len(chunk)
    return b"".join(chunks)


def _etag(info: os.stat_result) -> str:
    return f"{info.st_mtime_ns:x}-{info.st_ino:x}-{info.st_size:x}"


def _unchanged(file: IO[bytes], etag: str | None, read: Callable[[], bytes]) -> bytes:
    """What `read` gives, if the file had this etag before and after; we only ever rename, others may write in place."""
    if etag is not None and _etag(os.fstat(file.fileno())) != etag:
        raise Changed("the object was replaced while it was read")
    data = read()
    if etag is not None and _etag(os.fstat(file.fileno())) != etag:
        raise Changed("the object was written to while it was read")
    return data


@contextmanager
def _file_errors(name: str, *, writing: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) and not writing:
            raise FileNotFoundError(f"no object {name!r}") from error
        if error.errno in _FULL:
            raise StoreFull(f"the store's directory has no room: {error.strerror}", retry_after_s=10.0) from error
        if error.errno in _REFUSED:
            raise StoreRefused(
                f"the store's directory does not let this service in: {error.strerror}", retry_after_s=1.0
            ) from error
        raise Unavailable(f"store directory: {error.strerror}", retry_after_s=1.0) from error
