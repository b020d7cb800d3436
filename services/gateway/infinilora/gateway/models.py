"""GET /v1/models: exactly the names that would be served now."""

from datetime import datetime
from typing import Any

from infinilora.gateway.catalog import BaseEntry, Catalog, current_version
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.errors import ModelNotFound

OWNER = "infinilora"
CREATED_UNKNOWN = 0
"""A base model's files do not tell when they were made, and the answer must not change from call to call."""


def list_models(catalog: Catalog, tenant: str) -> dict[str, Any]:
    bases = [_base(entry) for entry in catalog.served_bases()]
    adapters = [_adapter(catalog, record) for record in catalog.usable_adapters(tenant)]
    return {"object": "list", "data": bases + adapters}


def show_model(catalog: Catalog, tenant: str, name: str) -> dict[str, Any]:
    """One of them, under any of its names. Raises what a request for this model would."""
    target = catalog.resolve(name, tenant)
    if target.digest is not None:
        record = catalog.find(target.tenant, target.name)
        return _adapter(catalog, record) | {"id": name, "digest": target.digest}
    entries = [entry for entry in catalog.served_bases() if entry.base == target.base]
    if entries:
        return _base(next((entry for entry in entries if entry.name == name), entries[0])) | {"id": name}
    raise ModelNotFound(f"base model '{name[:80]}' is not served now", param="model")


def _base(entry: BaseEntry) -> dict[str, Any]:
    return {
        "id": entry.name,
        "object": "model",
        "created": CREATED_UNKNOWN,
        "owned_by": OWNER,
        "parent": None,
        "root": entry.name,
        "digest": entry.base,
        "state": "ready",
    }


def _adapter(catalog: Catalog, record: AdapterRecord) -> dict[str, Any]:
    base, version = catalog.base_name(record.base), current_version(record)
    return {
        "id": record.name,
        "object": "model",
        "created": int(datetime.fromisoformat(version.created_at).timestamp()),
        "owned_by": record.tenant,
        "parent": base,
        "root": base,
        "digest": record.current,
        "state": catalog.state(record.current),
    }
