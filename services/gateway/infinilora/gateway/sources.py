"""Where an adapter's files may come from by name: a directory of this machine, or a prefix of a bucket.

Both only below roots that the operator has named. Exactly an adapter's own files are looked for, by their names:
nothing is listed, nothing else is read, and an error does not tell what lies there. Blocking; runs in a thread.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from infinilora.gateway.scratch import disk_errors
from infinilora.gateway.uploads import UploadLimits
from infinilora.protocol.errors import InvalidRequest, SourceNotFound, StoreRefused, TooLarge, Unavailable
from infinilora.runtime.blobs import Blob, BlobStore
from infinilora.weights.unpack import CONFIG_FILE, INITIAL_DIRS, MODEL_CONFIG_FILE, WEIGHT_FILES

CHUNK_BYTES = 8 << 20
PICKLE_FILE = "adapter_model.bin"
"""Looked for where there is no safetensors file, and never read: its name alone is what is refused."""
_INITS = re.compile(rb'"(pissa|olora|corda|lora_ga)', re.IGNORECASE)
"""Words of a config that began with first values. Nothing is understood here: the worker reads the file."""
_DROPPED = re.compile(r"\A[\0- ]|[\t\r\n]")
"""What `urlsplit` takes out without a word: the rest would be another address than the caller's."""
_NO_PARTS = urlsplit("")
_MAX_CONFIG_BYTES = 8 << 20


class Buckets(NamedTuple):
    """Buckets that may be read: `allowed` holds `bucket` or `bucket/prefix`; `open` gives one by name."""

    allowed: tuple[str, ...]
    open: Callable[[str], BlobStore] | None


class Sources:
    """Opens sources for adapters, or refuses them."""

    def __init__(self, roots: Sequence[Path], buckets: Buckets, limits: UploadLimits) -> None:
        self._roots = tuple(root.resolve() for root in roots)
        self._buckets = buckets
        self._limits = limits

    def fetch(self, source: str, scratch: Path) -> Path:
        """Put the adapter's files, or links to them, into `scratch`; gives `scratch`.

        Raises InvalidRequest for an address that is not allowed, SourceNotFound if no adapter is there, TooLarge,
        Unavailable if the store does not answer or the files change meanwhile.
        """
        parts = _parts(source)
        match parts.scheme:
            case "file" if parts.path.startswith("/") and not parts.netloc and not parts.query and not parts.fragment:
                self._link(parts.path, scratch)
                return scratch
            case "s3" if parts.netloc and not parts.query and not parts.fragment:
                self._copy(parts.netloc, parts.path.removeprefix("/").removesuffix("/"), scratch)
                return scratch
        raise InvalidRequest(
            f"source {source[:120]!r} is not supported; wanted file:///directory or s3://bucket/prefix",
            param="source",
        )

    # Directories

    def _link(self, path: str, scratch: Path) -> None:
        directory = self._inside(Path(path) if "\0" not in path else None)
        wanted = (CONFIG_FILE, MODEL_CONFIG_FILE, *WEIGHT_FILES, PICKLE_FILE)
        # A link among the files may lead elsewhere; a hub cache links within its own root.
        files = {name: self._inside(directory / name) for name in wanted if _is_file(directory / name)}
        if not files.keys() & {CONFIG_FILE, MODEL_CONFIG_FILE}:
            raise _no_adapter()
        files |= {name: self._inside(directory / name) for name in _initial_names() if _is_file(directory / name)}
        self._check_bytes(sum(file.stat().st_size for file in files.values()))
        for name, file in files.items():
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).symlink_to(file)

    def _inside(self, path: Path | None) -> Path:
        try:
            resolved = path.resolve() if path else None
        except (OSError, RuntimeError):  # links that lead round in a circle
            resolved = None
        if resolved is None or not any(resolved.is_relative_to(root) for root in self._roots):
            raise InvalidRequest(
                "the source is outside the directories this gateway may read (INFINILORA_ADAPTER_ROOTS)",
                param="source",
            )
        return resolved

    # Buckets

    def _copy(self, bucket: str, prefix: str, scratch: Path) -> None:
        if self._buckets.open is None:
            raise InvalidRequest("this gateway's store is not S3; use a file:// source or upload", param="source")
        if not prefix or not self._is_allowed(f"{bucket}/{prefix}"):
            raise InvalidRequest(
                "the source is outside the buckets this gateway may read (INFINILORA_ADAPTER_BUCKETS)",
                param="source",
            )
        blobs = self._buckets.open(bucket)
        files = _files_of(blobs, prefix)
        self._take(files, scratch, files)
        if (scratch / CONFIG_FILE).is_file():
            first = _first_values(blobs, prefix, is_named=_speaks_of_first_values(scratch / CONFIG_FILE))
            files += first
            self._take(first, scratch, files)
        if any(file.has_changed() for file in files):
            raise _changed()

    def _take(self, files: "list[_File]", scratch: Path, together: "list[_File]") -> None:
        """Copy files that are, `together` with what was taken before, not too large."""
        self._check_bytes(sum(file.blob.size for file in together))
        for file in files:
            with disk_errors():
                (scratch / file.name).parent.mkdir(exist_ok=True)
                (scratch / file.name).touch()
            if file.name != PICKLE_FILE:
                file.copy(scratch / file.name)

    def _is_allowed(self, path: str) -> bool:
        is_plain = all(part not in ("", ".", "..") for part in path.split("/"))
        return is_plain and any(f"{path}/".startswith(f"{allowed}/") for allowed in self._buckets.allowed)

    def _check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_bytes:
            raise TooLarge(f"the adapter's files hold more than {self._limits.max_bytes} bytes", param="source")


def _parts(source: str) -> SplitResult:
    """Of a URI, its path in plain letters; of text that is none, nothing."""
    try:
        parts = _NO_PARTS if _DROPPED.search(source) else urlsplit(source)
        return parts._replace(path=unquote(parts.path, errors="strict"))
    except ValueError:  # brackets without an address, letters that stand for others, bytes that are no letters
        return _NO_PARTS


class _File(NamedTuple):
    """An object of an adapter, in the state in which it was first met."""

    blobs: BlobStore
    key: str
    name: str
    blob: Blob

    def copy(self, target: Path) -> None:
        offset = 0
        with disk_errors():
            out = target.open("wb")
        with out:
            while offset < self.blob.size:
                try:
                    chunk = self.blobs.get_range(self.key, offset, CHUNK_BYTES, etag=self.blob.etag)
                except FileNotFoundError:
                    raise _changed() from None
                if not chunk:
                    raise _changed()
                with disk_errors():
                    out.write(chunk)
                offset += len(chunk)
            with disk_errors():
                out.flush()

    def has_changed(self) -> bool:
        return self.blobs.stat(self.key) != self.blob


def _files_of(blobs: BlobStore, prefix: str) -> list[_File]:
    """The config of an adapter and its weight file. Asks for these names only, so the right to read is enough."""
    config = _meet(blobs, prefix, CONFIG_FILE)
    if config is None:
        other = _meet_beside(blobs, prefix, MODEL_CONFIG_FILE)
        if other is None:
            raise _no_adapter()
        return [other]
    for name in (*WEIGHT_FILES, PICKLE_FILE):
        if weights := _meet_beside(blobs, prefix, name):
            return [config, weights]
    return [config]


def _initial_names() -> Iterator[str]:
    """First values, by their names below the adapter."""
    return (f"{directory}/{name}" for directory in INITIAL_DIRS for name in (CONFIG_FILE, WEIGHT_FILES[0]))


def _first_values(blobs: BlobStore, prefix: str, *, is_named: bool) -> list[_File]:
    """Those that lie beside an adapter. They count where its config is silent, too: PEFT's own recipe leaves it so.

    A store that will not say what is not there is then asked once, not eight times.
    """
    found = []
    for name in _initial_names():
        try:
            file = _meet(blobs, prefix, name)
        except StoreRefused:
            if not is_named:
                break
            continue
        found += [file] if file else []
    return found


def _speaks_of_first_values(config: Path) -> bool:
    with disk_errors(), config.open("rb") as file:
        return _INITS.search(file.read(_MAX_CONFIG_BYTES)) is not None


def _meet(blobs: BlobStore, prefix: str, name: str) -> _File | None:
    blob = blobs.stat(f"{prefix}/{name}")
    return _File(blobs, f"{prefix}/{name}", name, blob) if blob else None


def _meet_beside(blobs: BlobStore, prefix: str, name: str) -> _File | None:
    """`_meet`, where the store has answered already: it may refuse to say that something is not there."""
    try:
        return _meet(blobs, prefix, name)
    except StoreRefused:
        return None


def _is_file(path: Path) -> bool:
    """Also of names that no file system takes, and below directories that do not let us in: nothing is there."""
    try:
        return path.is_file()
    except OSError:
        return False


def _no_adapter() -> SourceNotFound:
    return SourceNotFound(f"the source holds no adapter: {CONFIG_FILE}: found none; wanted it there", param="source")


def _changed() -> Unavailable:
    return Unavailable("the source changed while it was read; try again", retry_after_s=1.0)
