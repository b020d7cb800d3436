"""An adapter's name as the adapter API writes it down, without a file behind it."""

from infinilora.protocol import keys
from infinilora.protocol.adapter import AdapterRecord, VersionRecord
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.store import Change, Stamp, Store


def stamp(name: str) -> Stamp:
    return Stamp(keys.REGISTRY_JOURNAL, keys.adapter_entry("default", name), keys.REGISTRY_REVISION)


async def register(
    store: Store, name: str, digest: Digest, base: Fingerprint, *, num_bytes: int = 10, pinned: bool = False
) -> None:
    """Under the default tenant; the name must be free."""
    version = VersionRecord(version=1, digest=digest, created_at="", source="", num_bytes=num_bytes, max_rank=8)
    record = AdapterRecord(
        tenant="default", name=name, base=base, revision=1, current=digest, versions=(version,), pinned=pinned
    )
    assert await store.swap([Change(keys.adapter("default", name), None, record)], also=[stamp(name)])
