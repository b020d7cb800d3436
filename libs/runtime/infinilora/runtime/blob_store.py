"""What a blob store is to those who use one: names, what can be asked, what can go wrong. Knows no store.

Errors: `FileNotFoundError` for what is not there, `StoreRefused` for a store that does not let us in, `StoreFull`,
`Changed` for an object that is no longer what it was, `Unavailable` for all else. Their words name no host, bucket,
key or secret: they may reach a client.
"""

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from infinilora.protocol.errors import InvalidRequest, Unavailable

SCRATCH = ".tmp"
"""Where a directory store writes; no object may lie below it."""
MAX_NAME_BYTES, MAX_PART_BYTES = 1024, 255
"""What S3 allows a key, and file systems a part of a path."""
_NOT_IN_NAMES = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories: control characters, halves of surrogates, ends of lines and paragraphs."""


class Changed(Unavailable):
    """The object is not the one that the caller began to read. Reading it anew, from the start, may succeed."""


class Blob(NamedTuple):
    """What a store says of an object. `etag` changes when the bytes do."""

    size: int
    etag: str


class BlobStore(Protocol):
    """A flat space of named bytes. What was put is whole or absent, never half.

    `most_ahead_bytes`: how far whoever reads by ranges best asks ahead; 0 where asking costs nothing but the bytes.
    """

    @property
    def most_ahead_bytes(self) -> int: ...

    def put_file(self, name: str, path: Path, *, if_absent: bool = False) -> bool: ...
    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store, whole or not at all. With `if_absent`, False when the name was taken (and left as it was)."""
        ...

    def get(self, name: str, *, etag: str | None = None) -> bytes:
        """All bytes; with `etag`, those of that state of the object or `Changed`."""
        ...

    def get_range(self, name: str, offset: int, num_bytes: int, *, etag: str | None = None) -> bytes:
        """At most `num_bytes` from `offset`; shorter only where the object ends. `etag` as for `get`."""
        ...

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`; how many bytes were there, fewer only where the object ends."""
        ...

    def stat(self, name: str) -> Blob | None: ...
    def list(self, prefix: str = "") -> list[str]:
        """All names that begin with `prefix`, sorted."""
        ...

    def delete(self, name: str) -> None:
        """Harmless when there is nothing of that name."""
        ...

    def deletion(self, name: str, *, within_s: int) -> Callable[[], None]:
        """What deletes the object, if it is called within so many seconds from now.

        Later it raises Unavailable and deletes nothing, wherever its process was stopped in between: so a caller may
        find out, once it has this, whether the object may still be deleted. Blocking, like all here.
        """
        ...


def check_object_name(name: str) -> str:
    """Return `name` if it can be an object's and a file's alike; no part may lead out of the store."""
    parts = name.split("/")
    if parts[0] == SCRATCH or not all(map(_is_plain, parts)) or len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidRequest(f"object name {name[:80]!r} is not allowed; wanted plain parts between '/'")
    return name


def _is_plain(part: str) -> bool:
    if part in ("", ".", "..") or any(unicodedata.category(letter) in _NOT_IN_NAMES for letter in part):
        return False
    return len(part.encode()) <= MAX_PART_BYTES
