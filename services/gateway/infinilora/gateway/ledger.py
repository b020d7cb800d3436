"""The registry's one writer: what names mean, changed by compare-and-set.

Every change reads what it depends on, decides, and writes all of it in one script that fails if anything read has
changed meanwhile; then it reads again. A version number is given once, tombstones included; an alias and an
adapter never share a name.
"""

import asyncio
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from infinilora.gateway.names import parse_target
from infinilora.gateway.registry import Registry
from infinilora.gateway.versions import (
    Content,
    earlier,
    last_version,
    next_record,
    now,
    numbered,
    reference,
    version_of,
)
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import AdapterRecord, AliasRecord, DigestRecord
from infinilora.protocol.control import AdapterEvent
from infinilora.protocol.errors import AdapterNotFound, Conflict, Unavailable
from infinilora.protocol.ids import Digest
from infinilora.runtime.bus import Bus
from infinilora.runtime.store import Change, Stamp, Store, Value

MAX_RACES = 20
"""Times a change is tried again because somebody else has changed the same names meanwhile."""
DYING_PAUSE_S = 0.25
"""Before a digest that is being collected is looked at again."""


class Outcome(NamedTuple):
    """A record, and whether this call has changed it."""

    record: AdapterRecord
    is_changed: bool


class _Held(NamedTuple):
    """What Redis holds under one name: an adapter's record or tombstone, and an alias; each or neither."""

    adapter: Value[AdapterRecord] | None
    alias: Value[AliasRecord] | None

    @property
    def live(self) -> AdapterRecord | None:
        """The record, unless it is a tombstone."""
        return self.adapter.value if self.adapter and not self.adapter.value.deleted_at else None


class Ledger:
    """Changes names. After each change this process's own mirror knows it, and the others are told."""

    def __init__(self, store: Store, bus: Bus, registry: Registry) -> None:
        self._store = store
        self._bus = bus
        self._registry = registry

    async def check_there(self) -> None:
        """Raises Unavailable while nothing could be written down."""
        await self._store.counter(keys.REGISTRY_REVISION)

    async def watch(self, digest: Digest) -> None:
        """Have a packed file that no name may ever lead to looked at later, and deleted then."""
        await self._store.swap([], also=[Stamp(keys.CONDEMNED, digest, keys.REGISTRY_REVISION)])

    async def point(self, tenant: str, name: str, content: Content) -> Outcome:
        """Let the name hold the content, unless it does or may not."""
        for _ in range(MAX_RACES):
            held = await self._held(tenant, name)
            if held.alias is not None:
                raise Conflict(f"'{name}' is an alias of '{held.alias.value.target}'; choose another", param="name")
            if held.live is not None and held.live.current == content.digest:
                return Outcome(held.live, is_changed=False)
            _check_replaceable(held.live, content)
            record = next_record(held.adapter.value if held.adapter else None, tenant, name, content)
            digest = await self._store.get(keys.digest(content.digest), DigestRecord)
            if digest is not None and digest.value.state == "dying":
                await asyncio.sleep(DYING_PAUSE_S)
                continue
            refs = frozenset(digest.value.refs if digest else ()) | {reference(record)}
            changes = [
                Change(keys.adapter(tenant, name), _raw(held.adapter), record),
                Change(keys.alias(tenant, name), None),
                Change(keys.digest(content.digest), _raw(digest), DigestRecord(refs=tuple(sorted(refs)))),
            ]
            if await self._write("put", record, changes, [_adapter_stamp(record)]):
                return Outcome(record, is_changed=True)
        raise Unavailable(f"adapter '{name}' changes too fast, or its content is being deleted", retry_after_s=2.0)

    async def rollback(self, tenant: str, name: str, to: int | None) -> Outcome:
        """Make an earlier version current: the one of this number, or the one before the present one."""

        def edit(record: AdapterRecord) -> AdapterRecord:
            version = earlier(record) if to is None else numbered(record, to)
            return msgspec.structs.replace(record, current=version.digest)

        return await self._edit(tenant, name, edit)

    async def pin(self, tenant: str, name: str, *, pinned: bool) -> Outcome:
        """Have the adapter kept resident whatever its heat, or not any more."""
        return await self._edit(tenant, name, lambda record: msgspec.structs.replace(record, pinned=pinned))

    async def delete(self, tenant: str, name: str) -> AdapterRecord | AliasRecord:
        """Forget an alias, or an adapter and its aliases. Requests that were admitted before keep their digest."""
        for _ in range(MAX_RACES):
            held = await self._held(tenant, name)
            if held.alias is not None:
                if await self._delete_alias(held.alias):
                    return held.alias.value
            elif held.adapter is None or held.live is None:
                raise AdapterNotFound(f"adapter '{name}' does not exist", param="name")
            elif await self._bury(held.adapter):
                return held.adapter.value
        raise _too_fast(name)

    async def alias(self, tenant: str, name: str, target: str) -> Outcome:
        """Let another name mean an adapter, its current version or a given one. The record is the adapter's."""
        ref = parse_target(target, tenant)
        wanted = ref.within
        for _ in range(MAX_RACES):
            here, there = await self._held(tenant, name), await self._held(tenant, ref.name)
            if there.alias is not None:
                raise Conflict(f"'{ref.name}' is an alias itself; name the adapter", param="target")
            if there.adapter is None or there.live is None:
                raise AdapterNotFound(f"adapter '{ref.name}' does not exist", param="target")
            if here.live is not None:
                raise Conflict(f"'{name}' is the name of an adapter; choose another", param="name")
            digest = version_of(there.live, ref, param="target").digest
            if here.alias is not None and here.alias.value.target == wanted:
                return Outcome(there.live, is_changed=False)
            old = here.alias.value.target.partition("@")[0] if here.alias else ref.name
            before = await self._held(tenant, old) if old != ref.name else None
            alias = AliasRecord(
                tenant=tenant, name=name, target=wanted, revision=here.alias.value.revision + 1 if here.alias else 1
            )
            record = _with_alias(there.live, name)
            changes = [
                Change(keys.alias(tenant, name), _raw(here.alias), alias),
                Change(keys.adapter(tenant, name), _raw(here.adapter)),
                Change(keys.adapter(tenant, ref.name), there.adapter.raw, record),
            ]
            stamps = [_alias_stamp(alias), _adapter_stamp(record)]
            if before is not None and before.live is not None:
                left = _without_alias(before.live, name)
                changes.append(Change(keys.adapter(tenant, old), _raw(before.adapter), left))
                stamps.append(_adapter_stamp(left))
            if await self._write("alias", record, changes, stamps, name=name, digest=digest):
                return Outcome(record, is_changed=True)
        raise _too_fast(name)

    async def _held(self, tenant: str, name: str) -> _Held:
        adapter = await self._store.get(keys.adapter(tenant, name), AdapterRecord)
        return _Held(adapter, await self._store.get(keys.alias(tenant, name), AliasRecord))

    async def _edit(self, tenant: str, name: str, edit: Callable[[AdapterRecord], AdapterRecord]) -> Outcome:
        for _ in range(MAX_RACES):
            found = await self._store.get(keys.adapter(tenant, name), AdapterRecord)
            if found is None or found.value.deleted_at:
                raise AdapterNotFound(f"adapter '{name}' does not exist", param="name")
            wanted = edit(found.value)
            if wanted == found.value:
                return Outcome(found.value, is_changed=False)
            record = msgspec.structs.replace(wanted, revision=found.value.revision + 1)
            if await self._write(
                "put", record, [Change(keys.adapter(tenant, name), found.raw, record)], [_adapter_stamp(record)]
            ):
                return Outcome(record, is_changed=True)
        raise _too_fast(name)

    async def _bury(self, found: Value[AdapterRecord]) -> bool:
        """Put a tombstone in a record's place, take its aliases away, and have its digests looked at."""
        record = found.value
        tombstone = msgspec.structs.replace(
            record,
            revision=record.revision + 1,
            versions=(),
            pinned=False,
            aliases=(),
            deleted_at=now(),
            last_version=last_version(record),
        )
        changes = [Change(keys.adapter(record.tenant, record.name), found.raw, tombstone)]
        stamps = [_adapter_stamp(tombstone)]
        for name in record.aliases:
            alias = await self._store.get(keys.alias(record.tenant, name), AliasRecord)
            if alias is not None and alias.value.target.partition("@")[0] == record.name:
                changes.append(Change(keys.alias(record.tenant, name), alias.raw, None))
                stamps.append(_alias_stamp(alias.value))
        digests = dict.fromkeys(version.digest for version in record.versions)
        stamps += [Stamp(keys.CONDEMNED, digest, keys.REGISTRY_REVISION) for digest in digests]
        return await self._write("delete", tombstone, changes, stamps)

    async def _delete_alias(self, found: Value[AliasRecord]) -> bool:
        alias = found.value
        target = await self._store.get(keys.adapter(alias.tenant, alias.target.partition("@")[0]), AdapterRecord)
        if target is None:
            raise AdapterNotFound(f"what '{alias.name}' means does not exist", param="name")
        record = _without_alias(target.value, alias.name)
        changes = [
            Change(keys.alias(alias.tenant, alias.name), found.raw, None),
            Change(keys.adapter(record.tenant, record.name), target.raw, record),
        ]
        return await self._write(
            "delete", record, changes, [_alias_stamp(alias), _adapter_stamp(record)], name=alias.name
        )

    async def _write(
        self,
        action: Literal["put", "delete", "alias"],
        record: AdapterRecord,
        changes: list[Change],
        stamps: list[Stamp],
        *,
        name: str = "",
        digest: Digest | None = None,
    ) -> bool:
        """Make the changes, look at them, and announce what `name` (the record's own by default) means now."""
        swap = await self._store.swap(changes, also=stamps)
        if not swap:
            return False
        await self._registry.look()
        event = AdapterEvent(
            action=action,
            tenant=record.tenant,
            name=name or record.name,
            revision=swap.counters[-1],
            digest=digest or record.current,
        )
        await self._bus.publish(subjects.ADAPTER_EVENTS, event)
        return True


def _check_replaceable(live: AdapterRecord | None, content: Content) -> None:
    if live is None:
        return
    if live.base != content.base:
        raise Conflict(f"adapter '{live.name}' belongs to another base model", param="name")
    if not content.may_replace:
        raise Conflict(
            f"adapter '{live.name}' exists with other content ({live.current[:19]}...); "
            "send replace=true to make this its next version",
            param="name",
        )


def _with_alias(record: AdapterRecord, name: str) -> AdapterRecord:
    aliases = tuple(sorted({*record.aliases, name}))
    return msgspec.structs.replace(record, revision=record.revision + 1, aliases=aliases)


def _without_alias(record: AdapterRecord, name: str) -> AdapterRecord:
    return msgspec.structs.replace(
        record, revision=record.revision + 1, aliases=tuple(alias for alias in record.aliases if alias != name)
    )


def _raw(value: Value[AdapterRecord] | Value[AliasRecord] | Value[DigestRecord] | None) -> bytes | None:
    return value.raw if value else None


def _adapter_stamp(record: AdapterRecord) -> Stamp:
    return Stamp(keys.REGISTRY_JOURNAL, keys.adapter_entry(record.tenant, record.name), keys.REGISTRY_REVISION)


def _alias_stamp(alias: AliasRecord) -> Stamp:
    return Stamp(keys.REGISTRY_JOURNAL, keys.alias_entry(alias.tenant, alias.name), keys.REGISTRY_REVISION)


def _too_fast(name: str) -> Conflict:
    return Conflict(f"'{name}' changes too fast to be written", param="name")
