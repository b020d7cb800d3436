"""How a request's `model` names a base model or one version of an adapter. Pure: knows no registry.

base:NAME                      a base model, by served name or alias
NAME                           a base model of this name, else the caller's adapter, current version
NAME@vN, NAME@sha256:...       one version of the caller's adapter
TENANT/NAME..., as above       the same, said in full
"""

import re
from typing import NamedTuple

from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import Digest, check_name, parse_digest

BASE_PREFIX = "base:"
_VERSION = re.compile(r"v([1-9][0-9]{0,8})\Z")


class BaseRef(NamedTuple):
    """A base model, said explicitly."""

    name: str


class AdapterRef(NamedTuple):
    """An adapter; `tenant` is None for the caller's own; at most one of `version` and `digest` is set."""

    tenant: str | None
    name: str
    version: int | None
    digest: Digest | None


def parse_model(text: str) -> BaseRef | AdapterRef:
    """Read a `model` field that is not a base model's served name. Raises InvalidRequest, param `model`."""
    if text.startswith(BASE_PREFIX):
        return BaseRef(text.removeprefix(BASE_PREFIX))
    path, _, selector = text.partition("@")
    tenant, slash, name = path.rpartition("/")
    try:
        if slash:
            check_name(tenant, "tenant")
        check_name(name, "model")
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="model") from None
    version, digest = _selector(selector) if "@" in text else (None, None)
    return AdapterRef(tenant if slash else None, name, version, digest)


def _selector(text: str) -> tuple[int | None, Digest | None]:
    if match := _VERSION.match(text):
        return int(match[1]), None
    try:
        return None, parse_digest(text)
    except InvalidRequest:
        raise InvalidRequest(
            f"version {text[:80]!r} is not understood; wanted vN or sha256:... after '@'", param="model"
        ) from None
