"""The registry's one writer: what names mean, changed by compare-and-set.

Every change reads what it depends on, decides, and writes all of it in one script that fails if anything read has
changed meanwhile; then it reads again. A version number is given once under a name, also across its deletion; an
alias and an adapter never share a name.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from infinilora.gateway.names import parse_target
from infinilora.gateway.registry import Registry
from infinilora.gateway.versions import (
    Content,
    earlier,
    last_version,
    next_record,
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
from infinilora.runtime.store import Change, Effect, Stamp, Store, Unstamp, Value

logger = logging.getLogger(__name__)

Action = Literal["put", "delete", "alias"]

MAX_RACES = 20
"""Times a change is tried again because somebody else has changed the same names meanwhile."""
DYING_PAUSE_S = 0.25
"""Before a digest that is being collected is looked at again."""
KEPT_CHANGES = 10_000
"""So many changes later a deleted name leaves the journal; a mirror that is further behind reads everything anew."""


class Outcome(NamedTuple):
    """A record, and whether this call has changed it."""

    record: AdapterRecord
    is_changed: bool


class _Held(NamedTuple):
    """What Redis holds under one name: an adapter's record, an alias, and the last version of what was deleted."""

    adapter: Value[AdapterRecord] | None
    alias: Value[AliasRecord] | None
    number: Value[int] | None

    @property
    def after(self) -> int:
        return self.number.value if self.number else 0

    @property
    def record(self) -> AdapterRecord | None:
        return self.adapter.value if self.adapter else None


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
        await self._take_up()
        await self._store.swap([], also=[Stamp(keys.CONDEMNED, digest, keys.REGISTRY_REVISION)])

    async def point(self, tenant: str, name: str, content: Content) -> Outcome:
        """Let the name hold the content, unless it does or may not."""
        for _ in range(MAX_RACES):
            held = await self._held(tenant, name)
            if held.alias is not None:
                raise Conflict(f"'{name}' is an alias of '{held.alias.value.target}'; choose another", param="name")
            if held.record is not None and held.record.current == content.digest:
                await self._tell("put", held.record)  # no change, but what the store had lost may be there again
                return Outcome(held.record, is_changed=False)
            _check_replaceable(held.record, content)
            record = next_record(held.record, tenant, name, content, after=held.after)
            digest = await self._store.get(keys.digest(content.digest), DigestRecord)
            if digest is not None and digest.value.state == "dying":
                await asyncio.sleep(DYING_PAUSE_S)
                continue
            refs = frozenset(digest.value.refs if digest else ()) | {reference(record)}
            changes = [
                Change(keys.adapter(tenant, name), _raw(held.adapter), record),
                Change(keys.alias(tenant, name), None),
                Change(keys.digest(content.digest), _raw(digest), DigestRecord(refs=tuple(sorted(refs)))),
                Change(keys.last_versions(tenant, name), _raw(held.number), None, name),
            ]
            entry = keys.adapter_entry(tenant, name)
            if await self._write("put", record, changes, [Unstamp(keys.GRAVES, entry), _adapter_stamp(record)]):
                return Outcome(record, is_changed=True)
        raise Unavailable(f"adapter '{name}' changes too fast, or its content is being deleted", retry_after_s=2.0)

    async def rollback(self, tenant: str, name: str, to: int | None) -> Outcome:
        """Make an earlier version current: the one of this number, or the one before the present one."""

        def edit(record: AdapterRecord) -> AdapterRecord:
            version = earlier(record) if to is None else numbered(record, to, param="to")
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
            elif held.adapter is None:
                raise AdapterNotFound(f"adapter '{name}' does not exist", param="name")
            elif await self._bury(held.adapter, held.number):
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
            if there.adapter is None:
                raise AdapterNotFound(f"adapter '{ref.name}' does not exist", param="target")
            if here.record is not None:
                raise Conflict(f"'{name}' is the name of an adapter; choose another", param="name")
            digest = version_of(there.adapter.value, ref, param="target").digest
            if here.alias is not None and here.alias.value.target == wanted:
                return Outcome(there.adapter.value, is_changed=False)
            old = here.alias.value.target.partition("@")[0] if here.alias else ref.name
            before = await self._held(tenant, old) if old != ref.name else None
            alias = AliasRecord(
                tenant=tenant, name=name, target=wanted, revision=here.alias.value.revision + 1 if here.alias else 1
            )
            record = _with_alias(there.adapter.value, name)
            changes = [
                Change(keys.alias(tenant, name), _raw(here.alias), alias),
                Change(keys.adapter(tenant, name), _raw(here.adapter)),
                Change(keys.adapter(tenant, ref.name), there.adapter.raw, record),
            ]
            also: list[Effect] = [
                Unstamp(keys.GRAVES, keys.alias_entry(tenant, name)),
                _alias_stamp(alias),
                _adapter_stamp(record),
            ]
            if before is not None and before.record is not None:
                left = _without_alias(before.record, name)
                changes.append(Change(keys.adapter(tenant, old), _raw(before.adapter), left))
                also.append(_adapter_stamp(left))
            if await self._write("alias", record, changes, also, name=name, digest=digest):
                return Outcome(record, is_changed=True)
        raise _too_fast(name)

    async def _held(self, tenant: str, name: str) -> _Held:
        adapter = await self._store.get(keys.adapter(tenant, name), AdapterRecord)
        alias = await self._store.get(keys.alias(tenant, name), AliasRecord)
        return _Held(adapter, alias, await self._store.get_field(keys.last_versions(tenant, name), name, int))

    async def _edit(self, tenant: str, name: str, edit: Callable[[AdapterRecord], AdapterRecord]) -> Outcome:
        for _ in range(MAX_RACES):
            found = await self._store.get(keys.adapter(tenant, name), AdapterRecord)
            if found is None:
                alias = await self._store.get(keys.alias(tenant, name), AliasRecord)
                if alias is not None:
                    raise Conflict(f"'{name}' is an alias of '{alias.value.target}'; name the adapter", param="name")
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

    async def _bury(self, found: Value[AdapterRecord], number: Value[int] | None) -> bool:
        """Leave a record's last version, take the rest and its aliases away, and have its digests looked at."""
        record = found.value
        tenant, name = record.tenant, record.name
        last = max(last_version(record), number.value if number else 0)
        changes = [
            Change(keys.adapter(tenant, name), found.raw, None),
            Change(keys.last_versions(tenant, name), _raw(number), last, name),
        ]
        stamps = [_adapter_stamp(record), _grave(keys.adapter_entry(tenant, name))]
        for other in record.aliases:
            alias = await self._store.get(keys.alias(tenant, other), AliasRecord)
            if alias is not None and alias.value.target.partition("@")[0] == name:
                changes.append(Change(keys.alias(tenant, other), alias.raw, None))
                stamps += [_alias_stamp(alias.value), _grave(keys.alias_entry(tenant, other))]
        digests = dict.fromkeys(version.digest for version in record.versions)
        stamps += [Stamp(keys.CONDEMNED, digest, keys.REGISTRY_REVISION) for digest in digests]
        return await self._write("delete", record, changes, stamps)

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
            "delete",
            record,
            changes,
            [_alias_stamp(alias), _grave(keys.alias_entry(alias.tenant, alias.name)), _adapter_stamp(record)],
            name=alias.name,
        )

    async def _write(
        self,
        action: Action,
        record: AdapterRecord,
        changes: Sequence[Change],
        also: Sequence[Effect],
        *,
        name: str = "",
        digest: Digest | None = None,
    ) -> bool:
        """Make the changes, look at them, and announce what `name` (the record's own by default) means now."""
        await self._take_up()
        swap = await self._store.swap([*changes, self._registry.is_same], also=also)
        if not swap:
            await self._registry.look()  # should it be another registry now: what was lost is put back first
            return False
        await self._registry.look()
        await self._tell(action, record, name=name, digest=digest, revision=swap.counters[-1])
        if action == "delete":
            await self._trim(swap.counters[-1] - KEPT_CHANGES)
        return True

    async def _tell(
        self, action: Action, record: AdapterRecord, *, name: str = "", digest: Digest | None = None, revision: int = 0
    ) -> None:
        event = AdapterEvent(
            action=action,
            tenant=record.tenant,
            name=name or record.name,
            revision=revision,
            digest=digest or record.current,
        )
        await self._bus.publish(subjects.ADAPTER_EVENTS, event)

    async def _take_up(self) -> None:
        """Nothing is written before the registry is known: a change is made to that life of it alone."""
        if not self._registry.is_loaded:
            await self._registry.refresh()

    async def _trim(self, up_to: int) -> None:
        """Have the journal no longer than its live names and the latest deletions."""
        try:
            await self._store.trim(keys.REGISTRY_JOURNAL, marks=keys.GRAVES, floor=keys.REGISTRY_FLOOR, up_to=up_to)
        except Unavailable as error:  # the deletion is done; the next one trims more
            logger.debug("journal not trimmed", extra={"reason": error.message})


def _check_replaceable(live: AdapterRecord | None, content: Content) -> None:
    if live is None:
        return
    if live.base != content.base:
        raise Conflict(f"adapter '{live.name}' belongs to another base model", param="name")
    if not content.may_replace:
        raise Conflict(
            f"adapter '{live.name}' exists with other content ({live.current[:19]}...); "
            "send replace=true (adapter push --replace) to make this its next version",
            param="name",
        )


def _with_alias(record: AdapterRecord, name: str) -> AdapterRecord:
    aliases = tuple(sorted({*record.aliases, name}))
    return msgspec.structs.replace(record, revision=record.revision + 1, aliases=aliases)


def _without_alias(record: AdapterRecord, name: str) -> AdapterRecord:
    return msgspec.structs.replace(
        record, revision=record.revision + 1, aliases=tuple(alias for alias in record.aliases if alias != name)
    )


def _raw(value: Value[AdapterRecord] | Value[AliasRecord] | Value[DigestRecord] | Value[int] | None) -> bytes | None:
    return value.raw if value else None


def _adapter_stamp(record: AdapterRecord) -> Stamp:
    return Stamp(keys.REGISTRY_JOURNAL, keys.adapter_entry(record.tenant, record.name), keys.REGISTRY_REVISION)


def _alias_stamp(alias: AliasRecord) -> Stamp:
    return Stamp(keys.REGISTRY_JOURNAL, keys.alias_entry(alias.tenant, alias.name), keys.REGISTRY_REVISION)


def _grave(entry: str) -> Stamp:
    """Behind the journal's own stamp: its number is the higher one."""
    return Stamp(keys.GRAVES, entry, keys.REGISTRY_REVISION)


def _too_fast(name: str) -> Conflict:
    return Conflict(f"'{name}' changes too fast to be written", param="name")
