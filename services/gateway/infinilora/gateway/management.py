"""/v1/adapters over HTTP: reads what a caller sends, and writes an adapter down, always in the same shape."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from infinilora.gateway.adapters import Adapters, Wish
from infinilora.gateway.catalog import Catalog, Found
from infinilora.gateway.desk import Caller
from infinilora.gateway.http import Handler, bounded, read_bounded
from infinilora.gateway.ledger import Ledger, Outcome
from infinilora.gateway.pages import read_page
from infinilora.gateway.schema import misfit
from infinilora.gateway.sources import Sources
from infinilora.gateway.sse import while_connected
from infinilora.gateway.states import States
from infinilora.gateway.uploads import UploadLimits, is_upload, received
from infinilora.gateway.versions import current_version, numbered
from infinilora.protocol.adapter import AliasRecord, VersionRecord
from infinilora.protocol.errors import FeatureOff, InvalidRequest
from infinilora.protocol.ids import check_name
from infinilora.runtime.problems import json_response

MAX_JSON_BYTES = 1 << 20
UPLOADED = "upload"
"""Shown as the source of adapters whose files came with the request."""


class CreateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/adapters with a source that the gateway reads itself."""

    name: str
    source: str
    base: str | None = None
    replace: bool = False
    tenant: str | None = None
    narrow: str = ""


class UploadForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/adapters with files: the fields beside them, or the query of an archive. What is empty is not said."""

    name: str = ""
    base: str = ""
    replace: bool = False
    tenant: str = ""
    narrow: str = ""


class AliasBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/adapters/NAME/alias: what NAME is to mean."""

    target: str
    tenant: str | None = None


class RollbackBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/adapters/NAME/rollback: to which version; None: to the one before the present one."""

    to: int | None = None
    tenant: str | None = None


class PinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/adapters/NAME/pin."""

    pinned: bool = True
    tenant: str | None = None


class VerifyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/adapters/NAME/verify: which version; None: the current one."""

    version: int | None = None
    tenant: str | None = None


B = TypeVar("B")


class Uploads(NamedTuple):
    """What uploads may hold: unpacked, and as the body of a request."""

    limits: UploadLimits
    max_body_bytes: int


class Management:
    """The handlers of /v1/adapters. While it is not on, each of them says so."""

    def __init__(
        self, adapters: Adapters, ledger: Ledger, catalog: Catalog, sources: Sources, uploads: Uploads, *, is_on: bool
    ) -> None:
        self._adapters = adapters
        self._ledger = ledger
        self._catalog = catalog
        self._sources = sources
        self._uploads = uploads
        self._is_on = is_on

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each route."""
        one = "/v1/adapters/{name:path}"
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/adapters", self.create),
            ("GET", "/v1/adapters", self.list_all),
            ("POST", f"{one}/alias", self.alias),
            ("POST", f"{one}/rollback", self.rollback),
            ("POST", f"{one}/pin", self.pin),
            ("POST", f"{one}/verify", self.verify),
            ("GET", one, self.show),
            ("DELETE", one, self.delete),
        ]
        return routes if self._is_on else [(method, path, self.refuse) for method, path, _ in routes]

    async def refuse(self, _request: Request, _caller: Caller) -> Response:
        """This gateway's operator lets nobody manage adapters here."""
        raise FeatureOff("the adapter API is switched off on this gateway (INFINILORA_ADAPTER_API is 'off')")

    async def create(self, request: Request, caller: Caller) -> Response:
        """Register an adapter from a store URI (JSON), from uploaded files or from an archive as the body."""
        if is_upload(request):
            async with received(bounded(request, self._uploads.max_body_bytes), self._uploads.limits) as upload:
                form = _read_form(upload.fields)
                tenant = self._tenant(request, caller, form.tenant)
                return await self._create(_uploaded(form, tenant, upload.source), caller)
        body = await _read(request, CreateBody)
        return await self._create(self._named(body, self._tenant(request, caller, body.tenant)), caller)

    async def list_all(self, request: Request, caller: Caller) -> Response:
        """A page of the caller's adapters, by name."""
        page = read_page(request.query_params)
        found = self._catalog.page(self._tenant(request, caller), page.after, page.limit + 1)
        states = self._catalog.states()
        return json_response(page.answer([self._show(each, states) for each in found]))

    async def show(self, request: Request, caller: Caller) -> Response:
        """One adapter with its versions, also by an alias."""
        return json_response(self._show(self._catalog.find(self._tenant(request, caller), _name(request))))

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Forget a name. What runs with it ends as it began."""
        name = _name(request)
        if self._catalog.is_base(name):
            raise InvalidRequest(f"'{name}' is a base model; only adapters can be deleted", param="name")
        gone = await self._ledger.delete(self._tenant(request, caller), name)
        if isinstance(gone, AliasRecord):
            shown = {"id": gone.name, "object": "alias", "tenant": gone.tenant, "alias_of": gone.target}
        else:
            shown = self._show(Found(gone, current_version(gone)))
        return json_response(shown | {"deleted": True})

    async def alias(self, request: Request, caller: Caller) -> Response:
        """Let a name mean an adapter, its current version or a given one, from now on."""
        body = await _read(request, AliasBody)
        tenant, name = self._tenant(request, caller, body.tenant), _name(request)
        self._catalog.check_free(name)
        outcome = await self._ledger.alias(tenant, name, body.target)
        return json_response(self._show(self._catalog.find(tenant, name)) | {"changed": outcome.is_changed})

    async def rollback(self, request: Request, caller: Caller) -> Response:
        """Make an earlier version the current one."""
        body = await _read(request, RollbackBody)
        return self._changed(
            await self._ledger.rollback(self._tenant(request, caller, body.tenant), _name(request), body.to)
        )

    async def pin(self, request: Request, caller: Caller) -> Response:
        """Have an adapter kept resident, or not any more."""
        body = await _read(request, PinBody)
        tenant = self._tenant(request, caller, body.tenant)
        return self._changed(await self._ledger.pin(tenant, _name(request), pinned=body.pinned))

    async def verify(self, request: Request, caller: Caller) -> Response:
        """Read, hash and test all of a version's packed file as the store has it now."""
        body = await _read(request, VerifyBody)
        found = self._catalog.find(self._tenant(request, caller, body.tenant), _name(request))
        version = found.version if body.version is None else numbered(found.record, body.version, param="version")
        verified = await while_connected(caller.receive, self._adapters.verify(version.digest))
        return json_response(
            {
                "id": found.record.name,
                "object": "adapter.verification",
                "version": version.version,
                "digest": version.digest,
                "ok": verified.is_whole,
                "bytes": verified.num_bytes,
                "blocks": verified.num_blocks,
                "num_faults": verified.num_faults,
                "faults": verified.faults,
                "self_test": msgspec.to_builtins(verified.tested),
            }
        )

    def _tenant(self, request: Request, caller: Caller, named: str | None = None) -> str:
        """Whom a request is for: the tenant that it names, in its body or its query, if its caller may."""
        asked = request.query_params.get("tenant")
        if named and asked and named != asked:
            raise InvalidRequest("body and query name different tenants; wanted one", param="tenant")
        return self._catalog.check_tenant(caller.tenant, named or asked)

    def _changed(self, outcome: Outcome) -> Response:
        shown = self._show(Found(outcome.record, current_version(outcome.record)))
        return json_response(shown | {"changed": outcome.is_changed})

    async def _create(self, wish: Wish, caller: Caller) -> Response:
        return self._changed(await while_connected(caller.receive, self._adapters.create(wish)))

    def _named(self, body: CreateBody, tenant: str) -> Wish:
        def place(scratch: Path) -> Path:
            return self._sources.fetch(body.source, scratch)

        return Wish(tenant, body.name, body.base, body.replace, body.source, place, body.narrow)

    def _show(self, found: Found, states: States | None = None) -> dict[str, Any]:
        record = found.record
        return {
            "id": found.alias.name if found.alias else record.name,
            "object": "adapter",
            "tenant": record.tenant,
            "name": record.name,
            "alias_of": found.alias.target if found.alias else None,
            "aliases": record.aliases,
            "base": self._catalog.base_name(record.base),
            "base_fingerprint": record.base,
            **(states or self._catalog.states()).show(found.version.digest),
            "pinned": record.pinned,
            **_show_version(found.version),
            "versions": [_show_version(v) for v in record.versions],
        }


def _uploaded(form: UploadForm, tenant: str, source: Path) -> Wish:
    return Wish(tenant, form.name, form.base or None, form.replace, UPLOADED, lambda _scratch: source, form.narrow)


def _show_version(version: VersionRecord) -> dict[str, Any]:
    return {
        "digest": version.digest,
        "version": version.version,
        "source": version.source,
        "bytes": version.num_bytes,
        "max_rank": version.max_rank,
        "matched_tensors": version.num_tensors,
        "created_at": version.created_at,
        "warnings": msgspec.to_builtins(version.warnings),
        "narrowed": version.narrowed or None,
        "narrow_error": version.narrow_error,
        "declared_base": version.declared_base or None,
    }


def _name(request: Request) -> str:
    return check_name(request.path_params["name"])


async def _read(request: Request, kind: type[B]) -> B:
    """The body as JSON of a kind; nothing at all is an empty object. Raises InvalidRequest."""
    raw = await read_bounded(request, MAX_JSON_BYTES)
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise misfit(error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def _read_form(fields: Mapping[str, str]) -> UploadForm:
    """Raises InvalidRequest for a field that an upload does not have, or that says nothing it can mean."""
    said = {name: text for name, text in fields.items() if text}
    try:
        return msgspec.convert(said, UploadForm, strict=False)
    except msgspec.ValidationError as error:
        raise misfit(error) from None
