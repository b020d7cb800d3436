"""The identifiers that travel between processes, and how each is written.

Knows nothing of where an id is stored or sent; every function here is pure.
"""

import hashlib
import re
from typing import Literal, NewType

from infinilora.protocol.errors import InvalidRequest

Digest = NewType("Digest", str)
"""`sha256:` and 64 hex digits: the content address of a packed adapter."""

Fingerprint = NewType("Fingerprint", str)
"""`sha256:` and 64 hex digits: the identity of a base model, by all its weights (FINGERPRINT_VERSION)."""

SloClass = Literal["interactive", "standard", "batch"]
"""How soon a request's first token is wanted; a scheduler's order, never a promise."""

PROTOCOL_VERSION = 1
"""Carried in every hello. A peer of this version or of the one before is understood."""

DEFAULT_TENANT = "default"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


def digest_of(data: bytes) -> Digest:
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


def parse_digest(text: str) -> Digest:
    if not _DIGEST.match(text):
        raise InvalidRequest(f"not a digest: {text[:80]!r}; wanted 'sha256:' and 64 hex digits")
    return Digest(text)


def check_name(text: str, what: str = "adapter name") -> str:
    """Return `text` if it may name a tenant or an adapter: letters, digits, `.`, `_`, `-`; at most 128."""
    if not _NAME.match(text):
        raise InvalidRequest(
            f"{what} {text[:80]!r} is not allowed; wanted 1 to 128 of letters, digits, '.', '_', '-', "
            "beginning with a letter or digit",
            param="name" if what == "adapter name" else what,
        )
    return text
