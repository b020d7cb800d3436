"""Every Redis key and every object name in one place. One writer per fact, named beside each key."""

import zlib
from collections.abc import Iterable

from infinilora.protocol.ids import Digest, Fingerprint

# Redis -----------------------------------------------------------------------------------------

REGISTRY_JOURNAL = "infinilora:registry:journal"
"""Sorted set of `adapter_entry` and `alias_entry`, each with the revision of its last change: mirrors read what is
after theirs. Deleted names stay in it for a while. Writer: the adapter API."""

GRAVES = "infinilora:registry:graves"
"""Sorted set of those entries of the journal whose record is gone, by the revision of that. Writer: the adapter API."""

REGISTRY_FLOOR = "infinilora:registry:floor"
"""The highest number of a grave that was taken out of the journal: whoever has not read so far reads all anew. Writer:
the adapter API."""

REGISTRY_REVISION = "infinilora:registry:revision"
"""Counter, raised by each change of the registry; mirrors compare it. Writer: the adapter API."""

REGISTRY_LIFE = "infinilora:registry:life"
"""JSON `RegistryLife`: gone only when everything is, and then the registry is put back. Writer: the adapter API."""

CONDEMNED = "infinilora:registry:condemned"
"""Sorted set of digests that a deleted name had, oldest first. Writers: the adapter API adds, the leading coordinator
removes."""

LEADER = "infinilora:leader"
"""Lease of the leading coordinator. Writer: coordinators."""

EPOCH = "infinilora:epoch"
"""Counter: the fencing token of the leadership. Writer: coordinators."""

DRAINS = "infinilora:drains"
"""JSON list of groups that an operator wants emptied, and of engines that are to take no new work; those that go as
fewer are wanted are in `desired`. Writer: the leading coordinator."""

FREEZE = "infinilora:freeze"
"""JSON `Frozen`, while the coordinator is to decide nothing by itself. Writer: the leading coordinator."""

AUDIT = "infinilora:audit"
"""Sorted set of JSON `AuditEntry`, each under its number. Writer: the leading coordinator, in one step with the act."""

AUDIT_NUMBER = "infinilora:audit:number"
"""Counter: acts ever noted. Writer: the leading coordinator."""


SCALE = "infinilora:scale"
"""JSON object: an operator's own counts, `engines:MODEL` and `groups:MODEL`. Writer: the leading coordinator."""


CALENDAR = "infinilora:calendar"
"""Hash place in the season -> JSON `CalendarSpan`. Writer: the leading coordinator."""


def demand(base: Fingerprint) -> str:
    """JSON `DemandHistory`: what a new leader forecasts from. Writer: the leading coordinator."""
    return f"infinilora:demand:{base}"


def desired(base: Fingerprint) -> str:
    """JSON `Desired`: how many engines and groups there should be. Writer: the leading coordinator."""
    return f"infinilora:desired:{base}"


ASLEEP = "infinilora:asleep"
"""JSON object base -> served name: the bases that were left without an engine, until one is ready again. Gateways know
them from here, and are ready for who wakes them. Writer: the leading coordinator."""


def adapter(tenant: str, name: str) -> str:
    """JSON `AdapterRecord`. Writers, by compare-and-set: the adapter API; of `pinned` also the leading coordinator."""
    return f"infinilora:adapter:{tenant}/{name}"


def last_versions(tenant: str, name: str) -> str:
    """Hash name -> the highest version ever given under a name that is deleted now. Writer: the adapter API.

    A tenant's deleted names are spread over 4096 hashes: small ones are kept without a pointer, in some bytes a name.
    """
    return f"infinilora:last-versions:{tenant}:{zlib.crc32(name.encode()) % 4096:03x}"


def alias(tenant: str, name: str) -> str:
    """JSON `AliasRecord`. Writer: the adapter API, by compare-and-set."""
    return f"infinilora:alias:{tenant}/{name}"


def adapter_entry(tenant: str, name: str) -> str:
    """How the journal names the record at `adapter(tenant, name)`."""
    return f"{tenant}/{name}"


def alias_entry(tenant: str, name: str) -> str:
    """How the journal names the record at `alias(tenant, name)`; a colon is in no tenant's name."""
    return f"{ALIAS}{tenant}/{name}"


ALIAS = "alias:"


def digest(digest: Digest) -> str:
    """JSON `DigestRecord`. Writers: the adapter API and the leading coordinator, by compare-and-set."""
    return f"infinilora:digest:{digest}"


def placement(base: Fingerprint) -> str:
    """JSON `PlacementHead`. Writer: the leading coordinator, in one step with its parts."""
    return f"infinilora:placement-head:{base}"


def placement_part(base: Fingerprint, group: str) -> str:
    """JSON `PlacementPart`. Writer: the leading coordinator."""
    return f"infinilora:placement-part:{base}:{group}"


def heat(half_life_s: int) -> str:
    """Sorted set of digests by the logarithm of a decayed count (runtime/heat.py). Writers: gateways add by script."""
    return f"infinilora:heat-ranks:{half_life_s}"


def heats(half_lives_s: Iterable[int]) -> dict[str, int]:
    """The keys of several half-lives, each with its own."""
    return {heat(half_life_s): half_life_s for half_life_s in half_lives_s}


def residency(group: str) -> str:
    """JSON list of resident digests, with a time to live. Writer: shard 0 of the group."""
    return f"infinilora:residency:{group}"


# Object store ----------------------------------------------------------------------------------


def packed(digest: Digest) -> str:
    """The packed file of an adapter. Written once by ingest, never rewritten."""
    return f"adapters/{digest.removeprefix('sha256:')}.safetensors"


def reference(digest: Digest) -> str:
    """What an adapter's own files computed, in a few numbers. Written by the adapter API, deleted with `packed`."""
    return f"references/{digest.removeprefix('sha256:')}.json"


def base_card(base: Fingerprint) -> str:
    """JSON `BaseCard`. Written by engines of that base."""
    return f"bases/{base.removeprefix('sha256:')}/card.json"


def base_file(base: Fingerprint, name: str) -> str:
    """A tokenizer file or chat template of the base."""
    return f"bases/{base.removeprefix('sha256:')}/files/{name}"
