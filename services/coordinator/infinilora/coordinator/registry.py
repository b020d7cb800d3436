"""A mirror of the adapter registry: follows its journal, keeps what placement needs of a record, writes nothing."""

from typing import NamedTuple

from infinilora.coordinator.placement import Adapter
from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord, RegistryLife
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.store import READ_BATCH, Store


class _Kept(NamedTuple):
    """Of one record: its base, its current version's digest and size, every version's digest."""

    base: Fingerprint
    current: Digest
    num_bytes: int
    is_pinned: bool
    digests: tuple[Digest, ...]


class Registry:
    """Names as of `_revision`. What is derived from all of them is made anew only when one has changed.

    `_whole_at`: no deletion up to this number is missed, whatever is taken out of the journal.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._life: RegistryLife | None = None
        self._revision = 0
        self._whole_at = 0
        self._kept: dict[str, _Kept] = {}
        self._digests: frozenset[Digest] | None = None
        self._adapters: dict[Fingerprint, dict[Digest, Adapter]] = {}

    async def refresh(self) -> None:
        """Read what changed, a batch at a time. Raises Unavailable and goes on from there the next time.

        Also while the registry is gone and no gateway has put it back: what has no name then has only lost it.
        """
        life = await self._living()
        if life != self._life:
            self._begin_anew()
            self._life = life
        revision = await self._store.counter(keys.REGISTRY_REVISION)
        if revision == self._revision == self._whole_at:
            return
        if revision < self._revision:  # another store, or an older state of it
            self._begin_anew()
        while True:
            if not self._revision:
                self._whole_at = revision
            await self._read_up_to(revision)
            # After the journal: what was taken out of it while it was read shows.
            if await self._store.counter(keys.REGISTRY_FLOOR) <= self._whole_at:
                break
            self._begin_anew()
            revision = await self._store.counter(keys.REGISTRY_REVISION)
        if await self._living() != self._life:  # lost while it was read: nothing of it is believed
            self._begin_anew()
            raise Unavailable("the registry has changed hands", retry_after_s=1.0)
        self._whole_at = self._revision

    async def _living(self) -> RegistryLife | None:
        held = await self._store.get(keys.REGISTRY_LIFE, RegistryLife)
        if held is None and self._life is not None:
            raise Unavailable("the registry is gone; a gateway puts it back", retry_after_s=1.0)
        return held.value if held else None

    def _begin_anew(self) -> None:
        self._revision = 0
        self._kept.clear()
        self._forget_derived()

    async def _read_up_to(self, revision: int) -> None:
        while revision > self._revision:
            entries = await self._store.journal(keys.REGISTRY_JOURNAL, self._revision, READ_BATCH)
            names = [entry for entry, _ in entries if not entry.startswith(keys.ALIAS)]
            if names:
                await self._read(names)
            # Numbers up to `revision` were given before the journal was read: there are no more of them.
            self._revision = entries[-1][1] if entries else revision

    async def _read(self, names: list[str]) -> None:
        found = await self._store.get_many([keys.adapter(*name.split("/", 1)) for name in names], AdapterRecord)
        for name, value in zip(names, found, strict=True):
            kept = _keep(value.value) if value else None
            if kept is None:
                self._kept.pop(name, None)
            else:
                self._kept[name] = kept
        self._forget_derived()

    def _forget_derived(self) -> None:
        self._digests = None
        self._adapters = {}

    def __len__(self) -> int:
        return len(self._kept)

    def digests(self) -> frozenset[Digest]:
        """Every version that some name still leads to."""
        if self._digests is None:
            self._digests = frozenset(digest for kept in self._kept.values() for digest in kept.digests)
        return self._digests

    def holds(self, name: str, digest: Digest) -> bool:
        """Whether a version of `tenant/name` has this digest."""
        return name in self._kept and digest in self._kept[name].digests

    def names(self) -> dict[Digest, str]:
        return {kept.current: name for name, kept in self._kept.items()}

    def adapters(self, base: Fingerprint) -> dict[Digest, Adapter]:
        """The current versions of one base, heat not yet known. Two names of one digest are one adapter."""
        if base not in self._adapters:
            adapters: dict[Digest, Adapter] = {}
            for kept in self._kept.values():
                if kept.base == base:
                    before = adapters.get(kept.current)
                    is_pinned = kept.is_pinned or (before is not None and before.is_pinned)
                    adapters[kept.current] = Adapter(kept.current, kept.num_bytes, is_pinned=is_pinned)
            self._adapters[base] = dict(sorted(adapters.items()))  # as placement wants those without heat
        return self._adapters[base]


def _keep(record: AdapterRecord) -> _Kept | None:
    """None where the current version is none of those that are kept."""
    sizes = {version.digest: version.num_bytes for version in record.versions}
    if record.current not in sizes:
        return None
    return _Kept(record.base, record.current, sizes[record.current], record.pinned, tuple(sizes))
