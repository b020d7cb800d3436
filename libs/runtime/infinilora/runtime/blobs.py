"""Bytes that outlive processes: an S3 bucket or a directory behind one interface, opened by URL.

Blocking: call it from threads. Names are those of `protocol/keys.py`: relative, `/` between parts.
"""

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from infinilora.protocol.errors import InvalidRequest
from infinilora.runtime.blob_store import Blob, BlobStore, Changed, check_object_name
from infinilora.runtime.credentials import Credentials
from infinilora.runtime.directory_blobs import DirectoryBlobs
from infinilora.runtime.s3_blobs import S3Blobs, S3Place

__all__ = ["Blob", "BlobStore", "Changed", "DirectoryBlobs", "S3Blobs", "check_object_name", "open_blobs"]

_WANTED = "s3://bucket?endpoint=http://host:port or file:///directory"
_OPTIONS = ("endpoint", "region", "style", "ca", "insecure")


def open_blobs(
    url: str, *, access_key: str = "", secret_key: str = "", credentials: Credentials | None = None
) -> BlobStore:
    """Open a store by its URL. Does not connect yet.

    `s3://bucket?endpoint=https://host:port&region=us-east-1&style=path&ca=/file.pem&insecure=false`, all options may
    be left out; or `file:///directory`. Without `credentials`, the two keys, or none if they are empty.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return DirectoryBlobs(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc and parts.path in ("", "/"):
        place = _s3_place(parts.netloc, parts.query)
        return S3Blobs(place, credentials or Credentials(access_key=access_key, secret_key=secret_key))
    raise InvalidRequest(f"store URL {url!r}: wanted {_WANTED}")


def _s3_place(bucket: str, query: str) -> S3Place:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise InvalidRequest(f"store URL: option {unknown[0]!r} is not known; wanted {', '.join(_OPTIONS)}")
    style = options.get("style", "auto")
    if style not in ("auto", "path", "virtual"):
        raise InvalidRequest(f"store URL: style={style!r}; wanted path, virtual or auto")
    insecure = options.get("insecure", "false")
    if insecure not in ("true", "false"):
        raise InvalidRequest(f"store URL: insecure={insecure!r}; wanted true or false")
    return S3Place(
        bucket=bucket,
        endpoint=options.get("endpoint", "https://s3.amazonaws.com"),
        region=options.get("region") or "us-east-1",
        style=style,
        ca_file=options.get("ca", ""),
        is_insecure=insecure == "true",
    )
