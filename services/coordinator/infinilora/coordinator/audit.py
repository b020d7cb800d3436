"""What operators did: an append-only journal in the store, each entry written in one step with what it changes."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import uuid4

import msgspec

from infinilora.protocol import keys
from infinilora.protocol.admin import AdminRequest, AuditEntry
from infinilora.protocol.errors import Unavailable
from infinilora.runtime.store import Change, Effect, Stamp, Store, Swap, Unstamp, fence

KEPT = 10_000
"""Entries; older ones are taken out as new ones come."""
TRIMMED = 8
"""At most, with each new one."""


class Numbered(NamedTuple):
    """An entry and its number: the first act ever was 1."""

    number: int
    entry: AuditEntry


def now() -> str:
    """As entries say when."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Audit:
    """Only a leader writes, and only under the epoch that it holds."""

    def __init__(self, store: Store, *, kept: int = KEPT) -> None:
        self._store = store
        self._kept = kept

    async def write(
        self, request: AdminRequest, epoch: int, changes: Sequence[Change] = (), also: Sequence[Effect] = ()
    ) -> Swap:
        """Make the changes and note the act, all or nothing. `also` comes first among the counters of the answer.

        Raises Unavailable if another leads, or what is changed has been changed meanwhile.
        """
        entry = AuditEntry(
            entry_id=uuid4().hex,
            at=now(),
            who=request.who,
            epoch=epoch,
            act=request.act,
            reason=request.reason,
        )
        stamp = Stamp(keys.AUDIT, msgspec.json.encode(entry).decode(), keys.AUDIT_NUMBER)
        swap = await self._store.swap([fence(epoch), *changes], also=[*also, stamp, *await self._outdated()])
        if not swap:
            raise Unavailable("another coordinator leads now, or it was changed meanwhile", retry_after_s=1.0)
        return swap

    async def read(self, limit: int, before: int | None = None) -> list[Numbered]:
        """The latest, newest first; those before a number, if one is given."""
        end = await self._store.counter(keys.AUDIT_NUMBER) + 1 if before is None else before
        found = await self._store.journal(keys.AUDIT, max(0, end - 1 - limit), limit)
        entries = [Numbered(number, msgspec.json.decode(text, type=AuditEntry)) for text, number in found]
        return [entry for entry in reversed(entries) if entry.number < end]

    async def _outdated(self) -> list[Unstamp]:
        last = await self._store.counter(keys.AUDIT_NUMBER) + 1 - self._kept
        if last < 1:
            return []
        oldest = await self._store.journal(keys.AUDIT, 0, TRIMMED)
        return [Unstamp(keys.AUDIT, text) for text, number in oldest if number <= last]
