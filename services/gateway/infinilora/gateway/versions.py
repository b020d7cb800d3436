"""What an adapter's record says of its versions, and what it says next. Pure but for the date of a version.

A number is given once under a name, also across its deletion, so that `name@vN` means one digest for ever.
"""

from datetime import UTC, datetime
from typing import NamedTuple

from infinilora.gateway.names import AdapterRef
from infinilora.protocol.adapter import AdapterRecord, AdapterWarning, VersionRecord
from infinilora.protocol.errors import AdapterNotFound, Conflict, InvalidRequest
from infinilora.protocol.ids import Digest, Fingerprint


class Content(NamedTuple):
    """What a name is to hold: a packed file that is in the store, and what is kept of how it came about."""

    base: Fingerprint
    digest: Digest
    source: str
    num_bytes: int
    max_rank: int
    num_tensors: int
    may_replace: bool
    warnings: tuple[AdapterWarning, ...] = ()
    narrowed: str = ""
    narrow_error: float = 0.0
    declared_base: str = ""


def next_record(old: AdapterRecord | None, tenant: str, name: str, content: Content, *, after: int) -> AdapterRecord:
    """The record with this content current; content that was a version before becomes current again.

    `after`: the last version of what was deleted under this name; 0 if nothing was.
    """
    versions = old.versions if old else ()
    number = max(last_version(old) if old else 0, after)
    if all(version.digest != content.digest for version in versions):
        number += 1
        version = VersionRecord(
            version=number,
            digest=content.digest,
            created_at=now(),
            source=content.source,
            num_bytes=content.num_bytes,
            max_rank=content.max_rank,
            num_tensors=content.num_tensors,
            warnings=content.warnings,
            narrowed=content.narrowed,
            narrow_error=content.narrow_error,
            declared_base=content.declared_base,
        )
        versions = (*versions, version)
    return AdapterRecord(
        tenant=tenant,
        name=name,
        base=content.base,
        revision=old.revision + 1 if old else 1,
        current=content.digest,
        versions=versions,
        pinned=old.pinned if old else False,
        fallback=old.fallback if old else "none",
        last_version=number,
        aliases=old.aliases if old else (),
    )


def last_version(record: AdapterRecord) -> int:
    """The highest version number ever given under this name."""
    return max([record.last_version, *(version.version for version in record.versions)])


def version_of(record: AdapterRecord, ref: AdapterRef, *, param: str) -> VersionRecord:
    """The version that a reference means. Raises AdapterNotFound."""
    for version in record.versions:
        if ref.version is None and ref.digest is None and version.digest == record.current:
            return version
        if ref.digest == version.digest or ref.version == version.version:
            return version
    raise AdapterNotFound(f"adapter '{record.name}' has no version '{ref.selector}'", param=param)


def current_version(record: AdapterRecord) -> VersionRecord:
    return next(version for version in record.versions if version.digest == record.current)


def reference(record: AdapterRecord) -> str:
    """How a `DigestRecord` names the current version."""
    return f"{record.tenant}/{record.name}@v{current_version(record).version}"


def earlier(record: AdapterRecord) -> VersionRecord:
    """The version before the current one. Raises Conflict."""
    number = current_version(record).version
    before = [version for version in record.versions if version.version < number]
    if not before:
        raise Conflict(f"adapter '{record.name}' has no version before v{number}", param="to")
    return max(before, key=lambda version: version.version)


def numbered(record: AdapterRecord, number: int, *, param: str) -> VersionRecord:
    """The version of this number. Raises InvalidRequest."""
    for version in record.versions:
        if version.version == number:
            return version
    there = ", ".join(f"v{version.version}" for version in record.versions)
    raise InvalidRequest(f"adapter '{record.name}' has no version v{number}; it has {there}", param=param)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
