"""The HTTP application, wired from what it is given. A test can build two."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response

from infinilora.gateway.catalog import Catalog
from infinilora.gateway.desk import Caller, Desk
from infinilora.gateway.http import Door, on_fault, on_http_error, read_bounded
from infinilora.gateway.management import Management
from infinilora.gateway.models import list_models, show_model
from infinilora.gateway.pages import MAX_LIMIT, read_page
from infinilora.gateway.unserved import refuse_query
from infinilora.runtime.metrics import CONTENT_TYPE, render
from infinilora.runtime.problems import json_response


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be answered now, and what is missing for all to be well."""

    is_ready: bool
    details: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deps:
    """Everything the routes need."""

    door: Door
    desk: Desk
    catalog: Catalog
    management: Management
    readiness: Callable[[], Readiness]
    metrics: CollectorRegistry
    max_body_bytes: int


def create_app(deps: Deps) -> FastAPI:
    app = FastAPI(
        title="InfiniLoRA",
        exception_handlers={HTTPException: on_http_error, Exception: on_fault},
    )

    async def completions(request: Request, caller: Caller) -> Response:
        """Complete prompts: text or token ids."""
        refuse_query(request.query_params)
        return await deps.desk.completions(caller, await read_bounded(request, deps.max_body_bytes))

    async def chat_completions(request: Request, caller: Caller) -> Response:
        """Answer a conversation."""
        refuse_query(request.query_params)
        return await deps.desk.chat(caller, await read_bounded(request, deps.max_body_bytes))

    async def models(request: Request, caller: Caller) -> Response:
        """Base models and adapters that would be served now."""
        page = read_page(request.query_params, default=MAX_LIMIT)
        return json_response(list_models(deps.catalog, caller.tenant, page))

    async def model(request: Request, caller: Caller) -> Response:
        """One base model or adapter."""
        return json_response(show_model(deps.catalog, caller.tenant, request.path_params["name"]))

    for method, path, handler in (
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions", chat_completions),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{name:path}", model),
        *deps.management.routes(),
    ):
        route = path.removeprefix("/v1/").partition("/{")[0].replace("/completions", "")
        app.add_api_route(path, deps.door.endpoint(route, handler), methods=[method], response_model=None)
    _add_probes(app, deps)
    return app


def _add_probes(app: FastAPI, deps: Deps) -> None:
    async def healthz() -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def readyz() -> Response:
        """Requests can be answered; `degraded` names what is away meanwhile."""
        readiness = deps.readiness()
        return json_response(readiness.details, status=200 if readiness.is_ready else 503)

    async def metrics() -> Response:
        """Prometheus text."""
        return Response(render(deps.metrics), media_type=CONTENT_TYPE)

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics)):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
