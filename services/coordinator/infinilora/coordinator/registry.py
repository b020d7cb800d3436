"""A mirror of the adapter registry, read again whenever its revision has moved. Writes nothing."""

from infinilora.coordinator.placement import Adapter
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.store import Store


class Registry:
    """All records as of `revision`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._revision = -1
        self._records: list[AdapterRecord] = []

    async def refresh(self) -> None:
        """Read what changed. Raises Unavailable and keeps what it had."""
        revision = await self._store.counter(keys.REGISTRY_REVISION)
        if revision == self._revision:
            return
        names = sorted(await self._store.members(keys.REGISTRY_INDEX))
        wanted = [keys.adapter(*name.split("/", 1)) for name in names]
        found = await self._store.get_many(wanted, AdapterRecord)
        self._records = [value.value for value in found if value is not None]
        # The revision was read first: a change in between is read again, never missed.
        self._revision = revision

    def __len__(self) -> int:
        return len(self._records)

    def digests(self) -> frozenset[Digest]:
        """Every version that some name still leads to."""
        return frozenset(version.digest for record in self._records for version in record.versions)

    def names(self) -> dict[Digest, str]:
        return {record.current: f"{record.tenant}/{record.name}" for record in self._records}

    def adapters(self, base: Fingerprint) -> dict[Digest, Adapter]:
        """The current versions of one base, heat not yet known. Two names of one digest are one adapter."""
        adapters: dict[Digest, Adapter] = {}
        for record in self._records:
            sizes = {version.digest: version.num_bytes for version in record.versions}
            if record.base == base and record.current in sizes:
                before = adapters.get(record.current)
                is_pinned = record.pinned or (before is not None and before.is_pinned)
                adapters[record.current] = Adapter(record.current, sizes[record.current], is_pinned=is_pinned)
        return adapters
