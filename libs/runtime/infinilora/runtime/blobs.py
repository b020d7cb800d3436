"""Bytes that outlive processes: an S3 bucket or a directory behind one interface.

Blocking: call it from threads. Names are those of `protocol/keys.py`: relative, `/` between parts. What was
put is whole or absent, never half. Errors: `FileNotFoundError` for what is not there, `Unavailable` for a
store that does not answer or refuses us.
"""

import io
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import urllib3
from minio import Minio
from minio.error import InvalidResponseError, S3Error, ServerError

from infinilora.protocol.errors import InvalidRequest, Unavailable

CONNECT_S, READ_S = 2.0, 20.0
PART_BYTES = 16 << 20
_SCRATCH = ".tmp"
_PART = re.compile(r"[A-Za-z0-9_@=+~,:-][A-Za-z0-9._@=+~,: -]*\Z|\.[A-Za-z0-9_-][A-Za-z0-9._-]*\Z")


class Blob(NamedTuple):
    """What a store says of an object. `etag` changes when the bytes do."""

    size: int
    etag: str


class BlobStore(Protocol):
    """A flat space of named bytes."""

    def put_file(self, name: str, path: Path, *, if_absent: bool = False) -> bool: ...
    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store, whole or not at all. With `if_absent`, False when the name was taken (and left as it was)."""
        ...

    def get(self, name: str) -> bytes: ...
    def get_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        """At most `num_bytes` from `offset`; shorter only where the object ends."""
        ...

    def stat(self, name: str) -> Blob | None: ...
    def list(self, prefix: str = "") -> list[str]:
        """All names that begin with `prefix`, sorted."""
        ...

    def delete(self, name: str) -> None:
        """Harmless when there is nothing of that name."""
        ...


def check_object_name(name: str) -> str:
    """Return `name` if it can be an object's and a file's alike; no part may lead out of the store."""
    parts = name.split("/")
    if len(name.encode()) > 1024 or parts[0] == _SCRATCH or not all(_PART.match(part) for part in parts):
        raise InvalidRequest(f"object name {name[:80]!r} is not allowed; wanted plain parts between '/'")
    return name


def open_blobs(url: str, *, access_key: str = "", secret_key: str = "") -> BlobStore:
    """Open `s3://bucket?endpoint=http://host:port&region=...` or `file:///directory`. Does not connect yet."""
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return DirectoryBlobs(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        endpoint = query.get("endpoint", "https://s3.amazonaws.com")
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise InvalidRequest(f"store endpoint {endpoint!r}: wanted http:// or https://")
        return S3Blobs(
            bucket=parts.netloc,
            endpoint=endpoint,
            region=query.get("region", "us-east-1"),
            access_key=access_key,
            secret_key=secret_key,
        )
    raise InvalidRequest(f"store URL {url!r}: wanted s3://bucket?endpoint=http://host:port or file:///directory")


class DirectoryBlobs:
    """A directory as the store. Writers rename a synced file into place; `link` decides who was first."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def put_file(self, name: str, path: Path, *, if_absent: bool = False) -> bool:
        with path.open("rb") as source:
            return self._write(name, source, if_absent=if_absent)

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        return self._write(name, io.BytesIO(data), if_absent=if_absent)

    def get(self, name: str) -> bytes:
        with _file_errors(name):
            return self._path(name).read_bytes()

    def get_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        with _file_errors(name), self._path(name).open("rb", buffering=0) as file:
            chunks, at = [], offset
            while at < offset + num_bytes:
                chunk = os.pread(file.fileno(), offset + num_bytes - at, at)
                if not chunk:
                    break
                chunks.append(chunk)
                at += len(chunk)
            return b"".join(chunks)

    def stat(self, name: str) -> Blob | None:
        path = self._path(name)
        try:
            with _file_errors(name):
                info = path.stat()
        except FileNotFoundError:
            return None
        return Blob(info.st_size, f"{info.st_mtime_ns:x}-{info.st_ino:x}-{info.st_size:x}") if path.is_file() else None

    def list(self, prefix: str = "") -> list[str]:
        if not self._root.is_dir():
            return []
        files = (p for p in self._root.rglob("*") if p.is_file())
        names = (p.relative_to(self._root).as_posix() for p in files)
        return sorted(n for n in names if n.startswith(prefix) and not n.startswith(_SCRATCH + "/"))

    def delete(self, name: str) -> None:
        with _file_errors(name):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        path = self._root / check_object_name(name)
        # The name cannot climb; a link planted inside the directory could.
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise InvalidRequest(f"object name {name[:80]!r} leads out of the store")
        return path

    def _write(self, name: str, source: IO[bytes], *, if_absent: bool) -> bool:
        target = self._path(name)
        scratch = self._root / _SCRATCH / secrets.token_hex(8)
        with _file_errors(name, writing=True):
            scratch.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with scratch.open("xb") as file:
                    while chunk := source.read(1 << 20):
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                return _place(scratch, target, if_absent=if_absent)
            finally:
                scratch.unlink(missing_ok=True)


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


@contextmanager
def _file_errors(name: str, *, writing: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) and not writing:
            raise FileNotFoundError(f"no object {name!r}") from error
        raise Unavailable(f"store directory: {error.strerror} ({name!r})", retry_after_s=1.0) from error


class S3Blobs:
    """One bucket. Made on first use if it is missing and we may; safe from many threads."""

    def __init__(self, *, bucket: str, endpoint: str, region: str, access_key: str, secret_key: str) -> None:
        at = urlsplit(endpoint)
        self._where = f"s3://{bucket} at {endpoint}"
        self._bucket = bucket
        timeout = urllib3.Timeout(connect=CONNECT_S, read=READ_S)
        retries = urllib3.Retry(total=2, connect=1, backoff_factor=0.1, status_forcelist=[500, 502, 503, 504])
        self._client = Minio(
            at.netloc,
            access_key=access_key or None,
            secret_key=secret_key or None,
            secure=at.scheme == "https",
            region=region,
            http_client=urllib3.PoolManager(timeout=timeout, retries=retries, maxsize=32),
        )

    def put_file(self, name: str, path: Path, *, if_absent: bool = False) -> bool:
        with path.open("rb") as source:
            return self._write(name, source, path.stat().st_size, if_absent=if_absent)

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        return self._write(name, io.BytesIO(data), len(data), if_absent=if_absent)

    def get(self, name: str) -> bytes:
        return self._read(name, {})

    def get_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        if num_bytes <= 0:
            return b""
        try:
            return self._read(name, {"offset": offset, "length": num_bytes})
        except _PastTheEnd:
            return b""

    def stat(self, name: str) -> Blob | None:
        try:
            with self._errors(name):
                found = self._client.stat_object(self._bucket, check_object_name(name))
        except FileNotFoundError:
            return None
        return Blob(found.size or 0, found.etag or "")

    def list(self, prefix: str = "") -> list[str]:
        try:
            with self._errors(prefix):
                found = self._client.list_objects(self._bucket, prefix=prefix, recursive=True)
                return sorted(o.object_name or "" for o in found if not o.is_dir)
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        try:
            with self._errors(name):
                self._client.remove_object(self._bucket, check_object_name(name))
        except FileNotFoundError:
            return

    def _read(self, name: str, span: dict[str, int]) -> bytes:
        with self._errors(name):
            response = self._client.get_object(self._bucket, check_object_name(name), **span)
            try:
                return bytes(response.read())
            finally:
                response.close()
                response.release_conn()

    def _write(self, name: str, source: IO[bytes], num_bytes: int, *, if_absent: bool) -> bool:
        # Not every S3 honours If-None-Match on every kind of upload, so we look first. The names put this way
        # are content addresses: should two writers pass at once, they write the same bytes.
        if if_absent and self.stat(name) is not None:
            return False
        with self._errors(name):
            try:
                self._upload(name, source, num_bytes)
            except S3Error as error:
                # Made only when it is missed: keys of least right may write to a bucket and not look at it.
                if error.code != "NoSuchBucket":
                    raise
                self._make_bucket()
                source.seek(0)
                self._upload(name, source, num_bytes)
        return True

    def _upload(self, name: str, source: IO[bytes], num_bytes: int) -> None:
        self._client.put_object(self._bucket, check_object_name(name), source, num_bytes, part_size=PART_BYTES)

    def _make_bucket(self) -> None:
        try:
            self._client.make_bucket(self._bucket)
        except S3Error as error:
            if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except S3Error as error:
            if error.code in ("NoSuchKey", "NoSuchBucket", "NoSuchObject", "ResourceNotFound"):
                raise FileNotFoundError(f"no object {name!r} in {self._where}") from error
            if error.code == "InvalidRange":
                raise _PastTheEnd from error
            raise Unavailable(f"{self._where} refused {name!r}: {error.code} {error.message}") from error
        except (InvalidResponseError, ServerError, urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(f"{self._where} does not answer: {error}", retry_after_s=1.0) from error


class _PastTheEnd(Exception):
    """A range that begins after the object's last byte."""
