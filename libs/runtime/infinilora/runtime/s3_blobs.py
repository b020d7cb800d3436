"""A bucket of any S3 as a blob store, through the `minio` client. Every request goes to the endpoint that was named.

What its errors are to us is `s3_errors`.
"""

import io
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.error import S3Error, ServerError

from infinilora.protocol.errors import InvalidRequest, Unavailable
from infinilora.runtime.blob_store import Blob, Changed, check_object_name
from infinilora.runtime.credentials import Credentials
from infinilora.runtime.s3_errors import PastTheEnd, store_errors
from infinilora.runtime.s3_keys import keys_of

CONNECT_S, READ_S = 2.0, 10.0
"""To connect, and between two pieces of an answer."""
SLOWEST_BYTES_PER_S = 64 << 10
"""A whole answer may take `READ_S` and what its bytes take at this rate: a server that drips is one that hangs."""
PART_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)\Z")


@dataclass(frozen=True, slots=True)
class S3Place:
    """Which bucket, and how its server is reached. `auto` style: virtual hosts on Amazon's, paths elsewhere."""

    bucket: str
    endpoint: str
    region: str = "us-east-1"
    style: str = "auto"
    ca_file: str = ""
    """PEM of the authority that signed the server's certificate; empty: the usual ones."""
    is_insecure: bool = False
    """Take any certificate."""


class S3Blobs:
    """One bucket. Made on first use if it is missing and we may; safe from many threads."""

    most_ahead_bytes = 8 << 20

    def __init__(
        self,
        place: S3Place,
        credentials: Credentials,
        *,
        read_s: float = READ_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._bucket = place.bucket
        self._read_s = read_s
        self._is_plain = urlsplit(place.endpoint).scheme == "http"
        self._http = _http(place, read_s)
        self._client = _client(place, credentials, self._http)

    def put_file(self, name: str, path: Path, *, if_absent: bool = False) -> bool:
        with path.open("rb") as source:
            return self._write(name, source, path.stat().st_size, if_absent=if_absent)

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        return self._write(name, io.BytesIO(data), len(data), if_absent=if_absent)

    def get(self, name: str, *, etag: str | None = None) -> bytes:
        with self._errors(name), self._answer(name, etag) as answer:
            return self._body(answer, _announced(answer))

    def get_range(self, name: str, offset: int, num_bytes: int, *, etag: str | None = None) -> bytes:
        if num_bytes <= 0:
            return b""
        try:
            with self._errors(name), self._answer(name, etag, offset=offset, length=num_bytes) as answer:
                return self._body(answer, _ranged(answer, offset, num_bytes))
        except PastTheEnd:
            return b""

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        data = self.get_range(name, offset, len(into))
        into[: len(data)] = data
        return len(data)

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

    def deletion(self, name: str, *, within_s: int) -> Callable[[], None]:
        """The request is signed now, and the store itself refuses it once it is too old."""
        deadline = self._clock() + within_s
        with self._errors(name):
            url = self._client.get_presigned_url(
                "DELETE", self._bucket, check_object_name(name), expires=timedelta(seconds=within_s)
            )

        def delete() -> None:
            if self._clock() <= deadline:
                with self._errors(name):
                    status = self._http.request("DELETE", url).status
                    if status in (200, 204, 404):
                        return
                    if self._clock() <= deadline:
                        raise ServerError("the object was not deleted", status)
            raise Unavailable("too late to delete the object", retry_after_s=1.0)

        return delete

    def _errors(self, name: str) -> AbstractContextManager[None]:
        return store_errors(name, is_plain=self._is_plain)

    @contextmanager
    def _answer(self, name: str, etag: str | None, **span: int) -> Iterator[Any]:
        condition = None if etag is None else {"If-Match": f'"{etag}"'}
        answer = self._client.get_object(self._bucket, check_object_name(name), request_headers=condition, **span)
        try:
            # Not every server heeds the condition.
            if etag is not None and answer.headers.get("etag", "").strip('"') != etag:
                raise Changed("the object was replaced while it was read")
            yield answer
        finally:
            answer.close()
            answer.release_conn()

    def _body(self, answer: Any, wanted: int | None) -> bytes:
        """The whole answer, which is `wanted` bytes long if that was announced."""
        deadline = time.monotonic() + self._read_s + (wanted or 0) / SLOWEST_BYTES_PER_S
        data = bytearray()
        while piece := answer.read1(_PIECE_BYTES, decode_content=False):
            data += piece
            if time.monotonic() > deadline:
                raise Unavailable(f"the object store is too slow: {len(data)} bytes came", retry_after_s=1.0)
        if wanted is not None and len(data) != wanted:
            raise Unavailable(f"the object store's answer was cut: found {len(data)} bytes; wanted {wanted}")
        return bytes(data)

    def _write(self, name: str, source: IO[bytes], num_bytes: int, *, if_absent: bool) -> bool:
        # Not every S3 honours If-None-Match on every kind of upload, so we look first. The names put this way
        # are content addresses: should two writers pass at once, they write the same bytes.
        if if_absent and self.stat(name) is not None:
            return False
        with self._errors(name):
            try:
                self._upload(name, source, num_bytes)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                # A server that wants TLS hangs up on a large body, and says what is wrong to a small question only.
                if self._is_plain and _has_hung_up(error):
                    self.stat(name)
                raise
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


def _has_hung_up(error: BaseException) -> bool:
    reason = getattr(error, "reason", None) or error
    return isinstance(reason, urllib3.exceptions.ProtocolError | ConnectionError)


def _http(place: S3Place, read_s: float) -> urllib3.PoolManager:
    _check_authority(place.ca_file)
    return urllib3.PoolManager(
        timeout=urllib3.Timeout(connect=CONNECT_S, read=read_s),
        # No redirects: what is asked of the endpoint, signature and all, goes nowhere else.
        retries=urllib3.Retry(
            total=2, connect=1, read=1, redirect=False, backoff_factor=0.1, status_forcelist=[500, 502, 503, 504]
        ),
        maxsize=32,
        cert_reqs="CERT_NONE" if place.is_insecure else "CERT_REQUIRED",
        ca_certs=place.ca_file or None,
    )


def _client(place: S3Place, credentials: Credentials, http: urllib3.PoolManager) -> Minio:
    at = urlsplit(place.endpoint)
    if at.scheme not in ("http", "https") or not at.hostname or at.path not in ("", "/") or at.query or at.username:
        raise InvalidRequest("store endpoint: wanted http://host:port or https://host:port, and nothing more")
    try:
        client = Minio(
            at.netloc,
            credentials=keys_of(credentials),
            secure=at.scheme == "https",
            region=place.region,
            http_client=http,
        )
    except ValueError as error:
        raise InvalidRequest(f"store URL: {error}") from error
    match place.style:
        case "path":
            client.disable_virtual_style_endpoint()
        case "virtual":
            client.enable_virtual_style_endpoint()
    return client


def _check_authority(ca_file: str) -> None:
    if not ca_file:
        return
    if not Path(ca_file).is_file():
        raise InvalidRequest(f"store URL: there is no file ca={ca_file}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_file)
    except OSError as error:  # ssl's errors are among these
        raise InvalidRequest(f"store URL: ca={ca_file}: found no certificate to read; wanted a PEM file") from error


def _announced(answer: Any) -> int | None:
    length = answer.headers.get("content-length")
    return int(length) if length is not None else None


def _ranged(answer: Any, offset: int, num_bytes: int) -> int:
    """How many bytes the answer to a ranged read must have. Raises Unavailable if it answers another question."""
    found = answer.headers.get("content-range", "")
    match = _RANGE.match(found) if answer.status == 206 else None
    if match is None:
        raise Unavailable(f"the object store gave no range: status {answer.status}, content-range {found[:60]!r}")
    first, last, total = (int(number) for number in match.groups())
    wanted = min(num_bytes, total - offset)
    if first != offset or last - first + 1 != wanted:
        raise Unavailable(f"the object store gave bytes {first}-{last} of {total}; wanted {wanted} bytes from {offset}")
    return wanted
