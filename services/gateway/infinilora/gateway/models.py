"""GET /v1/models: exactly the names that would be served now, a page of them at a time."""

from datetime import datetime
from typing import Any

from infinilora.gateway.catalog import BaseEntry, Catalog, Found
from infinilora.gateway.pages import Page
from infinilora.gateway.states import States
from infinilora.protocol.errors import Unavailable

OWNER = "infinilora"
CREATED_UNKNOWN = 0
"""A base model's files do not tell when they were made, and the answer must not change from call to call."""


def list_models(catalog: Catalog, tenant: str, page: Page) -> dict[str, Any]:
    """Base models are on the first page, before and beside the adapters that it has room for."""
    bases = [] if page.after else [_base(entry) for entry in catalog.served_bases()]
    found = catalog.usable(tenant, page.after, page.limit + 1)
    states = catalog.states()
    return page.answer([_adapter(catalog, states, each) for each in found], first=bases)


def show_model(catalog: Catalog, tenant: str, name: str) -> dict[str, Any]:
    """One of them, under any of its names. Raises what a request for this model would."""
    target = catalog.resolve(name, tenant)
    entries = [entry for entry in catalog.served_bases() if entry.base == target.base]
    if not entries:
        raise Unavailable(f"no engine of the base model of '{name[:120]}' answers now", retry_after_s=2.0)
    if target.digest is not None:
        states = catalog.states()
        shown = _adapter(catalog, states, catalog.find(target.tenant, target.name))
        return shown | {"id": name, "digest": target.digest, "state": states.of(target.digest)}
    return _base(next((entry for entry in entries if entry.name == name), entries[0])) | {"id": name}


def _base(entry: BaseEntry) -> dict[str, Any]:
    return {
        "id": entry.name,
        "object": "model",
        "created": CREATED_UNKNOWN,
        "owned_by": OWNER,
        "parent": None,
        "root": entry.name,
        "digest": entry.base,
        "state": entry.state,
    }


def _adapter(catalog: Catalog, states: States, found: Found) -> dict[str, Any]:
    base = catalog.base_name(found.record.base)
    return {
        "id": found.alias.name if found.alias else found.record.name,
        "object": "model",
        "created": int(datetime.fromisoformat(found.version.created_at).timestamp()),
        "owned_by": found.record.tenant,
        "parent": base,
        "root": base,
        "digest": found.version.digest,
        "state": states.of(found.version.digest),
    }
