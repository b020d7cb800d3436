"""Where an adapter's files may come from by name: a directory of this machine, or a prefix of a bucket.

Both only below roots that the operator has named. Nothing outside them is opened, and an error does not tell
what lies there. Blocking; runs in a thread.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from infinilora.gateway.uploads import UploadLimits, check_path
from infinilora.protocol.errors import InvalidRequest, TooLarge
from infinilora.runtime.blobs import BlobStore

CHUNK_BYTES = 8 << 20


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
        """The directory that holds the adapter; files of a bucket are copied into `scratch`."""
        parts = urlsplit(source)
        match parts.scheme:
            case "file" if parts.path.startswith("/") and not parts.netloc and not parts.query and not parts.fragment:
                return self._directory(unquote(parts.path))
            case "s3" if parts.netloc and not parts.query and not parts.fragment:
                return self._prefix(parts.netloc, unquote(parts.path).strip("/"), scratch)
        raise InvalidRequest(
            f"source {source[:120]!r} is not supported; wanted file:///directory or s3://bucket/prefix",
            param="source",
        )

    def _directory(self, path: str) -> Path:
        outside = InvalidRequest(
            "the source is outside the directories this gateway may read (INFINILORA_ADAPTER_ROOTS)",
            param="source",
        )
        if "\0" in path:
            raise outside
        directory = Path(path).resolve()
        if not self._may_read(directory):
            raise outside
        if not directory.is_dir():
            raise InvalidRequest("the source is not a directory", param="source")
        files = list(directory.iterdir())
        if len(files) > self._limits.max_files:
            raise TooLarge(f"the source holds more than {self._limits.max_files} files", param="source")
        # A link among the files may lead elsewhere; a hub cache links within its own root.
        if not all(self._may_read(file.resolve()) for file in files):
            raise outside
        if sum(file.stat().st_size for file in files if file.is_file()) > self._limits.max_bytes:
            raise TooLarge(f"the source holds more than {self._limits.max_bytes} bytes", param="source")
        return directory

    def _may_read(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)

    def _prefix(self, bucket: str, prefix: str, scratch: Path) -> Path:
        if self._buckets.open is None:
            raise InvalidRequest("this gateway's store is not S3; use a file:// source or upload", param="source")
        if not prefix or not self._is_allowed(f"{bucket}/{prefix}"):
            raise InvalidRequest(
                "the source is outside the buckets this gateway may read (INFINILORA_ADAPTER_BUCKETS)",
                param="source",
            )
        blobs = self._buckets.open(bucket)
        names = [name for name in blobs.list(prefix + "/") if not name.endswith("/")]
        if not names:
            raise InvalidRequest("the source holds no file", param="source")
        if len(names) > self._limits.max_files:
            raise TooLarge(f"the source holds more than {self._limits.max_files} files", param="source")
        self._copy(blobs, names, prefix, scratch)
        return scratch

    def _is_allowed(self, path: str) -> bool:
        is_plain = all(part not in ("", ".", "..") for part in path.split("/"))
        return is_plain and any(f"{path}/".startswith(f"{allowed}/") for allowed in self._buckets.allowed)

    def _copy(self, blobs: BlobStore, names: Sequence[str], prefix: str, scratch: Path) -> None:
        bytes_left = self._limits.max_bytes
        for name in names:
            blob = blobs.stat(name)
            bytes_left -= blob.size if blob else 0
            if bytes_left < 0:
                raise TooLarge(f"the source holds more than {self._limits.max_bytes} bytes", param="source")
            target = scratch.joinpath(*check_path(name.removeprefix(prefix + "/")).parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                offset, size = 0, blob.size if blob else 0
                while offset < size:
                    chunk = blobs.get_range(name, offset, CHUNK_BYTES)
                    if not chunk:
                        raise InvalidRequest(f"file {name!r} shrank while it was read", param="source")
                    out.write(chunk)
                    offset += len(chunk)
