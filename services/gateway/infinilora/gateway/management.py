"""/v1/adapters over HTTP: reads what a caller sends, and writes an adapter down, always in the same shape."""

from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from infinilora.gateway.adapters import Adapters, Place, Wish
from infinilora.gateway.catalog import Catalog, current_version
from infinilora.gateway.desk import Caller
from infinilora.gateway.http import bounded, read_bounded
from infinilora.gateway.problems import json_response
from infinilora.gateway.sources import Sources
from infinilora.gateway.sse import while_connected
from infinilora.gateway.uploads import Upload, UploadLimits, adapter_directory, store_uploads
from infinilora.protocol.adapter import AdapterRecord, VersionRecord
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import check_name

MAX_JSON_BYTES = 1 << 20
MAX_FIELDS = 16
UPLOADED = "upload"
"""Shown as the source of adapters whose files came with the request."""


class CreateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/adapters with a source that the gateway reads itself."""

    name: str
    source: str
    base: str | None = None
    replace: bool = False


class Management:
    """The handlers of /v1/adapters."""

    def __init__(
        self, adapters: Adapters, catalog: Catalog, sources: Sources, *, limits: UploadLimits, max_upload: int
    ) -> None:
        self._adapters = adapters
        self._catalog = catalog
        self._sources = sources
        self._limits = limits
        self._max_upload = max_upload

    async def create(self, request: Request, caller: Caller) -> Response:
        """Register an adapter from a store URI (JSON) or from uploaded files (multipart)."""
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            upload = bounded(request, self._max_upload)
            async with upload.form(max_files=self._limits.max_files, max_fields=MAX_FIELDS) as form:
                return await self._create(self._uploaded(form, caller.tenant), caller)
        body = _read_json(await read_bounded(request, MAX_JSON_BYTES))
        return await self._create(self._named(body, caller.tenant), caller)

    async def list_all(self, _request: Request, caller: Caller) -> Response:
        """The caller's adapters, by name."""
        data = [self._show(record) for record in self._catalog.adapters(caller.tenant)]
        return json_response({"object": "list", "data": data})

    async def show(self, request: Request, caller: Caller) -> Response:
        """One adapter with its versions."""
        name = check_name(request.path_params["name"])
        return json_response(self._show(self._catalog.find(caller.tenant, name)))

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Forget a name. What runs with it ends as it began."""
        record = await self._adapters.delete(caller.tenant, request.path_params["name"])
        return json_response(self._show(record) | {"deleted": True})

    async def _create(self, wish: Wish, caller: Caller) -> Response:
        outcome = await while_connected(caller.receive, self._adapters.create(wish))
        return json_response(self._show(outcome.record) | {"changed": outcome.is_changed})

    def _named(self, body: CreateBody, tenant: str) -> Wish:
        def place(scratch: Path) -> Path:
            return self._sources.fetch(body.source, scratch)

        return Wish(tenant, body.name, body.base, body.replace, body.source, place)

    def _uploaded(self, form: FormData, tenant: str) -> Wish:
        files = [item for _, item in form.multi_items() if isinstance(item, UploadFile)]
        uploads = [Upload(file.filename or "", file.file) for file in files]
        return Wish(
            tenant,
            _field(form, "name") or "",
            _field(form, "base"),
            (_field(form, "replace") or "").lower() in ("1", "true", "yes"),
            UPLOADED,
            self._unpack(uploads),
        )

    def _unpack(self, uploads: list[Upload]) -> Place:
        def place(scratch: Path) -> Path:
            store_uploads(uploads, scratch, self._limits)
            return adapter_directory(scratch)

        return place

    def _show(self, record: AdapterRecord) -> dict[str, Any]:
        version = current_version(record)
        return {
            "id": record.name,
            "object": "adapter",
            "tenant": record.tenant,
            "name": record.name,
            "base": self._catalog.base_name(record.base),
            "base_fingerprint": record.base,
            "state": self._catalog.state(record.current),
            "pinned": record.pinned,
            **_show_version(version),
            "versions": [_show_version(v) for v in record.versions],
        }


def _show_version(version: VersionRecord) -> dict[str, Any]:
    return {
        "digest": version.digest,
        "version": version.version,
        "source": version.source,
        "bytes": version.num_bytes,
        "max_rank": version.max_rank,
        "matched_tensors": version.num_tensors,
        "created_at": version.created_at,
    }


def _read_json(raw: bytes) -> CreateBody:
    try:
        return msgspec.json.decode(raw, type=CreateBody)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not what /v1/adapters takes: {error}") from None


def _field(form: FormData, name: str) -> str | None:
    value = form.get(name)
    return value if isinstance(value, str) and value else None
