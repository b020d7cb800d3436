"""Every tenant's names in memory, small enough for a hundred thousand of them. Knows no store.

A record is kept deflated against a typical one, which holds all that records have in common; what is left is
mostly its digest. Reading one inflates it: some ten microseconds, and nothing else is kept of it.
"""

import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator

import msgspec

from infinilora.protocol.adapter import AdapterRecord, AliasRecord, VersionRecord
from infinilora.protocol.ids import Digest, Fingerprint

Entry = AdapterRecord | AliasRecord

_WINDOW = -15
"""Raw deflate: no header, no checksum; these bytes never leave the process."""
_BASE_BYTES = 4
_ZEROS = "0" * 64
_TYPICAL = msgspec.json.encode(
    AdapterRecord(
        tenant="default",
        name="",
        base=Fingerprint(f"sha256:{_ZEROS}"),
        revision=1,
        current=Digest(f"sha256:{_ZEROS}"),
        versions=(
            VersionRecord(
                version=1,
                digest=Digest(f"sha256:{_ZEROS}"),
                created_at="2026-01-01T00:00:00+00:00",
                source="upload",
                num_bytes=9830400,
                max_rank=16,
                num_tensors=420,
            ),
        ),
        last_version=1,
    )
)


class Mirror:
    """Adapters and aliases by tenant and name; a name is one or the other."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Names] = {}
        self._bases: list[Fingerprint] = []
        self._num_adapters = 0

    def __len__(self) -> int:
        """Adapters; aliases are not counted."""
        return self._num_adapters

    def get(self, tenant: str, name: str) -> AdapterRecord | None:
        held = self._held(tenant, name)
        return _inflate(held) if isinstance(held, bytes) else None

    def alias(self, tenant: str, name: str) -> AliasRecord | None:
        held = self._held(tenant, name)
        return held if isinstance(held, AliasRecord) else None

    def put(self, record: AdapterRecord) -> None:
        """Note what a name holds now."""
        names = self._tenants.setdefault(record.tenant, _Names())
        self._num_adapters += not isinstance(names.held.get(record.name), bytes)
        names.put(record.name, self._base_mark(record.base) + _deflate(record))

    def put_alias(self, alias: AliasRecord) -> None:
        names = self._tenants.setdefault(alias.tenant, _Names())
        self._num_adapters -= isinstance(names.held.get(alias.name), bytes)
        names.put(alias.name, alias)

    def drop(self, tenant: str, name: str) -> None:
        if isinstance(self._held(tenant, name), bytes):
            self._tenants[tenant].drop(name)
            self._num_adapters -= 1

    def drop_alias(self, tenant: str, name: str) -> None:
        if isinstance(self._held(tenant, name), AliasRecord):
            self._tenants[tenant].drop(name)

    def page(self, tenant: str, after: str, limit: int, *, bases: Collection[Fingerprint] | None = None) -> list[Entry]:
        """The first `limit` adapters after a name, by name; with `bases`, those for one of them and their aliases."""
        names = self._tenants.get(tenant)
        if names is None:
            return []
        marks = None if bases is None else {self._base_mark(base) for base in bases}
        found: list[Entry] = []
        for name in names.after(after):
            if len(found) == limit:
                break
            held = names.held[name]
            if isinstance(held, bytes) if marks is None else self._mark_of(names, held) in marks:
                found.append(_inflate(held) if isinstance(held, bytes) else held)
        return found

    def entries(self) -> Iterator[Entry]:
        """Everything, in no order. The mirror must not change meanwhile."""
        for names in self._tenants.values():
            for held in names.held.values():
                yield _inflate(held) if isinstance(held, bytes) else held

    def _held(self, tenant: str, name: str) -> "bytes | AliasRecord | None":
        names = self._tenants.get(tenant)
        return names.held.get(name) if names else None

    def _mark_of(self, names: "_Names", held: "bytes | AliasRecord") -> bytes:
        """Which base an entry is for; an alias is for its adapter's."""
        if isinstance(held, AliasRecord):
            target = names.held.get(held.target.partition("@")[0])
            return target[:_BASE_BYTES] if isinstance(target, bytes) else b""
        return held[:_BASE_BYTES]

    def _base_mark(self, base: Fingerprint) -> bytes:
        if base not in self._bases:
            self._bases.append(base)
        return self._bases.index(base).to_bytes(_BASE_BYTES, "little")


class _Names:
    """One tenant's. The sorted list is made when a page is first asked for, and kept right from then on."""

    def __init__(self) -> None:
        self.held: dict[str, bytes | AliasRecord] = {}
        self._sorted: list[str] | None = None

    def put(self, name: str, value: bytes | AliasRecord) -> None:
        if name not in self.held and self._sorted is not None:
            insort(self._sorted, name)
        self.held[name] = value

    def drop(self, name: str) -> None:
        del self.held[name]
        if self._sorted is not None:
            del self._sorted[bisect_left(self._sorted, name)]

    def after(self, name: str) -> Iterator[str]:
        if self._sorted is None:
            self._sorted = sorted(self.held)
        for index in range(bisect_right(self._sorted, name) if name else 0, len(self._sorted)):
            yield self._sorted[index]


def _deflate(record: AdapterRecord) -> bytes:
    deflate = zlib.compressobj(level=6, wbits=_WINDOW, memLevel=8, zdict=_TYPICAL)
    return deflate.compress(msgspec.json.encode(record)) + deflate.flush()


def _inflate(held: bytes) -> AdapterRecord:
    inflate = zlib.decompressobj(wbits=_WINDOW, zdict=_TYPICAL)
    return msgspec.json.decode(inflate.decompress(held[_BASE_BYTES:]), type=AdapterRecord)
