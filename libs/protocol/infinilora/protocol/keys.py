"""Every Redis key and every object name in one place. One writer per fact, named beside each key."""

from infinilora.protocol.ids import Digest, Fingerprint

# Redis -----------------------------------------------------------------------------------------

REGISTRY_INDEX = "infinilora:registry:index"
"""Set of `tenant/name`. Writer: the adapter API."""

REGISTRY_REVISION = "infinilora:registry:revision"
"""Counter, raised by each change of the registry; mirrors compare it. Writer: the adapter API."""

LEADER = "infinilora:leader"
"""Lease of the leading coordinator. Writer: coordinators."""

EPOCH = "infinilora:epoch"
"""Counter: the fencing token of the leadership. Writer: coordinators."""


def adapter(tenant: str, name: str) -> str:
    """JSON `AdapterRecord`. Writer: the adapter API, by compare-and-set."""
    return f"infinilora:adapter:{tenant}/{name}"


def alias(tenant: str, name: str) -> str:
    """JSON `AliasRecord`. Writer: the adapter API, by compare-and-set."""
    return f"infinilora:alias:{tenant}/{name}"


def tenant_index(tenant: str) -> str:
    """Sorted set of a tenant's adapter names, all of score 0: pages are ranges of names. Writer: the adapter API."""
    return f"infinilora:registry:tenant:{tenant}"


def digest(digest: Digest) -> str:
    """JSON `DigestRecord`. Writers: the adapter API and the leading coordinator, by compare-and-set."""
    return f"infinilora:digest:{digest}"


def placement(base: Fingerprint) -> str:
    """JSON `Placement`. Writer: the leading coordinator."""
    return f"infinilora:placement:{base}"


def heat(half_life_s: int) -> str:
    """Hash digest -> "score stamp": exponentially decayed counts. Writers: gateways add; exact by script."""
    return f"infinilora:heat:{half_life_s}"


def residency(group: str) -> str:
    """JSON list of resident digests, with a time to live. Writer: shard 0 of the group."""
    return f"infinilora:residency:{group}"


# Object store ----------------------------------------------------------------------------------


def packed(digest: Digest) -> str:
    """The packed file of an adapter. Written once by ingest, never rewritten."""
    return f"adapters/{digest.removeprefix('sha256:')}.safetensors"


def base_card(base: Fingerprint) -> str:
    """JSON `BaseCard`. Written by engines of that base."""
    return f"bases/{base.removeprefix('sha256:')}/card.json"


def base_file(base: Fingerprint, name: str) -> str:
    """A tokenizer file or chat template of the base."""
    return f"bases/{base.removeprefix('sha256:')}/files/{name}"
