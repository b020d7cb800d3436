"""The files of one adapter out of whatever they came in: a tar or zip archive, or files with many others beside them.

Of everything that is there only a config and a weight file are written; the rest is passed over, however large.
No name of an archive becomes a path: what is kept lies at `<number of its directory>/<one of our names>`.
Every size is held against a limit before it is read, archives' own tables included; an archive may not hold many
times its own bytes, and a weight file is written on only while its header agrees with its size. Archives are opened
in the confined worker only.
"""

import bz2
import gzip
import io
import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from typing_extensions import override

from infinilora.protocol.errors import AdapterInvalid, InvalidRequest, SourceNotFound, TooLarge
from infinilora.weights.tensorfile import LENGTH_BYTES, check_file, header_end

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapters.safetensors")
"""What PEFT writes, and what MLX does."""
MODEL_CONFIG_FILE = "config.json"
"""Kept because speculators and Medusa heads have no other, and are to be refused by their names."""
INITIAL_DIRS = ("pissa_init", "olora_init", "corda_init", "lora_ga_init")
"""Directories beside an adapter's files with the values that it began with, under the same names (`pissa`)."""
KEPT = frozenset({CONFIG_FILE, MODEL_CONFIG_FILE, *WEIGHT_FILES})
PICKLE = re.compile(r"adapter(_model|_\d+)?\.(bin|pt|pth|pkl|ckpt)\Z", re.IGNORECASE)
"""Weight files that are refused by their name: an empty file of that name is kept, so that the reader can say so."""

MAX_ENTRIES = 4096
MAX_DEPTH = 16
MAX_READ_BYTES = 1 << 20
"""The most that is asked for at once, of a file's bytes or of an archive's tables."""
MAX_RATIO = 100
"""How many times its own bytes an archive may hold: weights hardly shrink, unless a B is all zero."""
MIN_UNPACKED_BYTES = 64 << 20
"""What any archive may hold, however small it is."""
_TABLES_BYTES = 16 << 20
"""What the headers of a tar may take beside its files."""
_LONGEST_MAGIC = 262
_UNREADABLE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, gzip.BadGzipFile),
    *(EOFError, ValueError, NotImplementedError, RuntimeError, OverflowError, MemoryError),
)
"""What the standard library raises over a broken or unusual archive."""


_File = IO[bytes] | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile


class FileLimits(NamedTuple):
    """Of one adapter's files: bytes (in an archive: of all that it says it holds), and entries, kept or not."""

    max_bytes: int = 16 << 30
    max_entries: int = MAX_ENTRIES
    whose: str = ""
    """Why it is so many bytes, where it is not the limit of the whole system."""

    def of_archive(self, num_bytes: int) -> "FileLimits":
        """The limits of an archive of so many bytes."""
        most = max(MIN_UNPACKED_BYTES, MAX_RATIO * num_bytes)
        if most >= self.max_bytes:
            return self
        return self._replace(max_bytes=most, whose=f", {MAX_RATIO} times what the archive is")


class Picker:
    """Chooses among the files that go by, and counts them. Raises InvalidRequest and TooLarge, with param `files`."""

    def __init__(self, target: Path, limits: FileLimits) -> None:
        self._target = target
        self._limits = limits
        self._num_entries = 0
        self._bytes_left = limits.max_bytes
        self._kept: dict[PurePosixPath, Path] = {}

    def place(self, name: str) -> Path | None:
        """Where to write the file of this name, in a directory that exists; None to pass it over."""
        self.count()
        path = check_path(name)
        is_pickle = PICKLE.match(path.name) is not None
        if path.name not in KEPT and not is_pickle:
            return None
        directory = self._kept.setdefault(path.parent, self._target / str(len(self._kept)))
        directory.mkdir(exist_ok=True)
        file = directory / path.name
        if file.exists():
            raise InvalidRequest(f"file {name[:200]!r} comes twice", param="files")
        if is_pickle:
            file.touch()
            return None
        return file

    def count(self) -> None:
        """One more entry, whatever it is."""
        self._num_entries += 1
        if self._num_entries > self._limits.max_entries:
            raise TooLarge(f"the upload holds more than {self._limits.max_entries} files", param="files")

    def spend(self, num_bytes: int) -> None:
        """Count bytes that are about to be read or written."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise TooLarge(
                f"the files hold more than {self._limits.max_bytes} bytes{self._limits.whose}", param="files"
            )

    def chosen(self) -> Path:
        """The directory of the adapter: that of the topmost config. First values are put into it. Ask once."""
        found = self._holding(CONFIG_FILE) or self._holding(MODEL_CONFIG_FILE)
        if not found:
            raise SourceNotFound(
                f"{CONFIG_FILE}: found none among {self._num_entries} files; wanted one", param="files"
            )
        depth, top = found[0]
        twins = [str(at) for level, at in found if level == depth]
        if len(twins) > 1:
            raise InvalidRequest(f"the upload holds {len(twins)} adapters ({', '.join(twins[:4])})", param="files")
        for name in INITIAL_DIRS:
            if beside := self._kept.get(top / name):
                beside.rename(self._kept[top] / name)
        return self._kept[top]

    def _holding(self, name: str) -> list[tuple[int, PurePosixPath]]:
        return sorted((len(at.parts), at) for at, directory in self._kept.items() if (directory / name).exists())


def check_path(name: str) -> PurePosixPath:
    """A relative path that does not climb. Raises InvalidRequest."""
    path = PurePosixPath(name.removeprefix("./"))
    is_plain = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    if not is_plain or len(path.parts) > MAX_DEPTH or re.search(r"[\\\0]", name):
        raise InvalidRequest(f"file name {name[:80]!r} is not allowed; wanted a plain relative path", param="files")
    return path


def unpack(archive: Path, target: Path, limits: FileLimits) -> Path:
    """Write the adapter's files of a tar or zip archive below the empty directory `target`; gives their directory."""
    with archive.open("rb") as file:
        return unpack_file(file, target, limits)


def unpack_file(file: IO[bytes], target: Path, limits: FileLimits) -> Path:
    """`unpack` of an open, seekable file."""
    limits = limits.of_archive(file.seek(0, io.SEEK_END))
    picker = Picker(target, limits)
    try:
        for entry in _entries(file, limits.max_bytes):
            _keep(entry, picker)
    except _UNREADABLE as error:
        said = str(error) or type(error).__name__
        raise InvalidRequest(f"the archive cannot be read: {said[:200]}", param="files") from None
    return picker.chosen()


class _Entry(NamedTuple):
    name: str
    kind: str
    """`file`, `directory`, or what else it is."""
    num_bytes: int
    """As its header says; a tar entry has no more, a zip entry may."""
    data: "_Opener"


class _Opener(NamedTuple):
    """Opens the entry: only for a file that is wanted."""

    archive: tarfile.TarFile | zipfile.ZipFile
    member: tarfile.TarInfo | zipfile.ZipInfo

    def __call__(self) -> IO[bytes]:
        if isinstance(self.archive, zipfile.ZipFile):
            assert isinstance(self.member, zipfile.ZipInfo)  # noqa: S101 - made together
            return self.archive.open(self.member)
        assert isinstance(self.member, tarfile.TarInfo)  # noqa: S101 - made together
        opened = self.archive.extractfile(self.member)
        if opened is None:
            raise tarfile.ReadError("an entry without content")
        return opened


def _keep(entry: _Entry, picker: Picker) -> None:
    if entry.kind == "directory":
        picker.count()
        if PurePosixPath(entry.name).parts:  # none: `.`, which `tar -C DIR .` begins with
            check_path(entry.name)
        return
    if entry.kind != "file":
        raise InvalidRequest(f"archive entry {entry.name[:80]!r} is a {entry.kind}; wanted plain files", param="files")
    if entry.num_bytes < 0:
        raise tarfile.ReadError(f"an entry of {entry.num_bytes} bytes")
    picker.spend(entry.num_bytes)
    path = picker.place(entry.name)
    if path is None:
        return
    with entry.data() as data, path.open("x+b") as out:
        if path.name in WEIGHT_FILES and not _has_good_header(entry, data, out, path):
            out.truncate(entry.num_bytes)  # a hole: the reader says what is wrong, and needs the header alone for it
            return
        _write(data, out, entry.num_bytes)
        if out.tell() != entry.num_bytes:
            raise InvalidRequest(f"archive entry {entry.name[:80]!r} is shorter than it says", param="files")
        if data.read(1):
            raise InvalidRequest(f"archive entry {entry.name[:80]!r} is longer than it says", param="files")


def _has_good_header(entry: _Entry, data: IO[bytes], out: IO[bytes], path: Path) -> bool:
    """Write as much of a weight file as tells what the rest must be, and look whether that is so."""
    _write(data, out, min(LENGTH_BYTES, entry.num_bytes))
    out.seek(0)
    _write(data, out, header_end(out.read(LENGTH_BYTES), entry.num_bytes))
    out.flush()
    try:
        check_file(path, entry.num_bytes)
    except AdapterInvalid:
        return False
    return True


def _write(data: IO[bytes], out: IO[bytes], end: int) -> None:
    """Write on to this place of the file, or as far as there is something."""
    while (left := end - out.tell()) > 0 and (chunk := data.read(min(left, MAX_READ_BYTES))):
        out.write(chunk)


def _entries(file: IO[bytes], max_bytes: int) -> Iterator[_Entry]:
    file.seek(0)
    magic = file.read(_LONGEST_MAGIC)
    file.seek(0)
    if magic.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_entries(file)
    if magic.startswith(b"\x1f\x8b"):
        return _tar_entries(gzip.open(file), max_bytes)
    if magic.startswith(b"BZh"):
        return _tar_entries(bz2.open(file), max_bytes)
    if magic.startswith(b"\xfd7zXZ\0"):
        return _tar_entries(lzma.open(file), max_bytes)
    if magic[257:262] == b"ustar":
        return _tar_entries(file, max_bytes)
    raise InvalidRequest("the upload is no archive; wanted zip, tar, tar.gz, tar.bz2 or tar.xz", param="files")


def _tar_entries(file: _File, max_bytes: int) -> Iterator[_Entry]:
    forward = _Forward(file, max_bytes + _TABLES_BYTES)
    with tarfile.TarFile(fileobj=forward) as archive:
        for member in archive:
            if member.isdir():
                kind = "directory"
            elif member.issym() or member.islnk():
                kind = "link"
            else:
                kind = "file" if member.isreg() and not member.issparse() else "device or sparse file"
            yield _Entry(member.name, kind, member.size, _Opener(archive, member))
    while forward.read(MAX_READ_BYTES):
        pass  # what packed it has its checksum at the very end: bits that flipped on the way are seen there only


def _zip_entries(file: IO[bytes]) -> Iterator[_Entry]:
    with zipfile.ZipFile(_Bounded(file)) as archive:
        for info in archive.infolist():
            mode = info.external_attr >> 16
            if info.filename.endswith("/"):  # is_dir of the standard library fails for an empty name
                kind = "directory"
            elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                kind = "link"
            elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                # The standard library bounds what one read inflates for these two only.
                kind = f"file compressed by method {info.compress_type}"
            else:
                kind = "file"
            yield _Entry(info.filename, kind, info.file_size, _Opener(archive, info))


class _Bounded(io.RawIOBase):
    """A file of which nobody can ask for more than a little at once: archives' tables are read in one piece."""

    def __init__(self, file: _File) -> None:
        self._file = file

    @override
    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._file.read(min(size, MAX_READ_BYTES + 1) if size >= 0 else MAX_READ_BYTES + 1)
        except OSError as error:
            if error.errno is None:  # bz2's word for a broken stream; a disk's has a number
                raise ValueError(str(error)) from error
            raise
        if size > MAX_READ_BYTES or len(data) > MAX_READ_BYTES:
            raise ValueError(f"a table of more than {MAX_READ_BYTES} bytes")
        return data

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    @override
    def tell(self) -> int:
        return self._file.tell()

    @override
    def seekable(self) -> bool:
        return True


class _Forward(_Bounded):
    """Goes forward only, and not too far: a compressed file is inflated once, no header leads round in a circle."""

    def __init__(self, file: _File, end: int) -> None:
        super().__init__(file)
        self._end = end

    @override
    def read(self, size: int = -1, /) -> bytes:
        self._check(self.tell())
        return super().read(size)

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET or offset < self._file.tell():
            raise tarfile.ReadError("an entry that leads backwards")
        self._check(offset)
        return super().seek(offset)

    def _check(self, offset: int) -> None:
        if offset > self._end:
            raise ValueError("headers that lead further than its files")
