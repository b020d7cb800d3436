"""Uploaded adapter files to a directory: single files, or one tar or zip archive, unpacked with care.

Every name must be a plain relative path, every entry a plain file, and sizes are counted as bytes are
written, not as headers promise. Blocking; runs in a thread.
"""

import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from infinilora.protocol.errors import InvalidRequest, TooLarge

CHUNK_BYTES = 1 << 20
MAX_NAME_CHARS = 200
MAX_DEPTH = 4
UNREADABLE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, NotImplementedError, RuntimeError),
)
"""What the standard library raises over a broken or unusual archive."""
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]*\Z")


class UploadLimits(NamedTuple):
    """Of one adapter's files, unpacked."""

    max_bytes: int = 16 << 30
    max_files: int = 256


class Upload(NamedTuple):
    """One file of a multipart body."""

    name: str
    data: IO[bytes]


def store_uploads(uploads: list[Upload], target: Path, limits: UploadLimits) -> None:
    """Write the files, or the content of the one archive, into the empty directory `target`."""
    if not uploads:
        raise InvalidRequest("the upload holds no file", param="files")
    writer = _Writer(target, limits)
    if len(uploads) == 1 and (entries := _entries(uploads[0])) is not None:
        _unpack(entries, writer, uploads[0].name)
        return
    for upload in uploads:
        writer.write(upload.name, upload.data)


def adapter_directory(target: Path) -> Path:
    """Where the adapter lies: archives often hold one directory with everything in it."""
    here = list(target.iterdir())
    if len(here) == 1 and here[0].is_dir() and not (target / "adapter_config.json").exists():
        return adapter_directory(here[0])
    return target


class _Writer:
    """Counts what is written against the limits of one upload."""

    def __init__(self, target: Path, limits: UploadLimits) -> None:
        self._target = target
        self._limits = limits
        self._bytes_left = limits.max_bytes
        self._files_left = limits.max_files

    def write(self, name: str, data: IO[bytes]) -> None:
        if self._files_left == 0:
            raise TooLarge(f"the upload holds more than {self._limits.max_files} files", param="files")
        self._files_left -= 1
        path = self._target.joinpath(*check_path(name).parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as out:
                while chunk := data.read(CHUNK_BYTES):
                    self._bytes_left -= len(chunk)
                    if self._bytes_left < 0:
                        raise TooLarge(f"the files hold more than {self._limits.max_bytes} bytes", param="files")
                    out.write(chunk)
        except FileExistsError:
            raise InvalidRequest(f"file {name!r} comes twice", param="files") from None


def check_path(name: str) -> PurePosixPath:
    """A relative path of plain names. Raises InvalidRequest."""
    path = PurePosixPath(name.removeprefix("./"))
    if (
        len(name) > MAX_NAME_CHARS
        or len(path.parts) > MAX_DEPTH
        or not path.parts
        or not all(_PART.match(part) for part in path.parts)
    ):
        raise InvalidRequest(f"file name {name[:80]!r} is not allowed; wanted a plain relative path", param="files")
    return path


class _Entry(NamedTuple):
    name: str
    kind: str
    """`file`, `directory`, or what else it is."""
    data: IO[bytes] | None


def _entries(upload: Upload) -> Iterator[_Entry] | None:
    """The entries of a tar or zip archive, by its content; None for any other file."""
    if upload.name.endswith((".safetensors", ".json")):
        return None
    if zipfile.is_zipfile(upload.data):
        upload.data.seek(0)
        return _zip_entries(upload.data)
    upload.data.seek(0)
    is_tar = tarfile.is_tarfile(upload.data)
    upload.data.seek(0)
    return _tar_entries(upload.data) if is_tar else None


def _unpack(entries: Iterator[_Entry], writer: _Writer, archive: str) -> None:
    try:
        for entry in entries:
            if entry.kind == "directory":
                continue
            if entry.data is None:
                raise InvalidRequest(
                    f"archive entry {entry.name[:80]!r} is a {entry.kind}; wanted plain files", param="files"
                )
            with entry.data as data:
                writer.write(entry.name, data)
    except UNREADABLE as error:
        raise InvalidRequest(f"archive {archive[:80]!r} cannot be read: {error}", param="files") from None


def _tar_entries(file: IO[bytes]) -> Iterator[_Entry]:
    with tarfile.open(fileobj=file, mode="r:*") as archive:
        for member in archive:
            if member.isreg():
                yield _Entry(member.name, "file", archive.extractfile(member))
            elif member.isdir():
                yield _Entry(member.name, "directory", None)
            else:
                yield _Entry(member.name, "link" if member.issym() or member.islnk() else "device", None)


def _zip_entries(file: IO[bytes]) -> Iterator[_Entry]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            mode = info.external_attr >> 16
            if info.is_dir():
                yield _Entry(info.filename, "directory", None)
            elif mode & 0o170000 not in (0, 0o100000):
                yield _Entry(info.filename, "link", None)
            else:
                yield _Entry(info.filename, "file", archive.open(info))
