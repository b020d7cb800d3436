"""How a request's `model` names a base model or one version of an adapter. Pure: knows no registry.

base:NAME                      a base model, by served name or alias
NAME                           a base model of this name, else the caller's adapter, current version
NAME@vN, NAME@sha256:...       one version of the caller's adapter
TENANT/NAME..., as above       the same, said in full

A NAME may be an alias, which means an adapter, its current version or a given one; an alias has no versions.
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

    @property
    def selector(self) -> str:
        """What stands behind the `@`; empty for the current version."""
        return self.digest or (f"v{self.version}" if self.version else "")

    @property
    def within(self) -> str:
        """How its own tenant writes it."""
        return f"{self.name}@{self.selector}" if self.selector else self.name


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


def parse_target(text: str, tenant: str) -> AdapterRef:
    """Read what an alias of this tenant is to mean. Raises InvalidRequest, param `target`."""
    try:
        ref = parse_model(text)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="target") from None
    if isinstance(ref, BaseRef) or ref.tenant not in (None, tenant):
        raise InvalidRequest(
            f"target {text[:120]!r} cannot have an alias; wanted one of the tenant's own adapters: "
            "NAME, NAME@vN or NAME@sha256:...",
            param="target",
        )
    return ref


def parse_aliases(text: str) -> dict[str, str]:
    """Read `alias=served-name,...`, other names of base models. Raises ValueError for what would name nothing."""
    aliases: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        alias, _, name = (part.strip() for part in entry.partition("="))
        if not alias or not name or "=" in name:
            raise ValueError(f"{entry[:80]!r} is not 'alias=served-name'")
        if alias in aliases:
            raise ValueError(f"alias {alias[:80]!r} is there twice")
        aliases[alias] = name
    return aliases


def _selector(text: str) -> tuple[int | None, Digest | None]:
    if match := _VERSION.match(text):
        return int(match[1]), None
    try:
        return None, parse_digest(text)
    except InvalidRequest:
        raise InvalidRequest(
            f"version {text[:80]!r} is not understood; wanted vN or sha256:... after '@'", param="model"
        ) from None
