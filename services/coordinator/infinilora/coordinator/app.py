"""The coordinator's HTTP: health, metrics, and the fleet as JSON. Reads; every decision is made elsewhere."""

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry

from infinilora.runtime import metrics


def create_app(
    *, fleet: Callable[[], dict[str, Any]], away: Callable[[], list[str]], is_ready: Callable[[], bool],
    registry: CollectorRegistry,
) -> FastAPI:  # fmt: skip
    """`away` names the dependencies that do not answer now; readiness does not depend on them once it was won."""
    app = FastAPI(title="InfiniLoRA coordinator", openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        return _json({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        missing = away()
        if not is_ready():
            return _json({"status": "starting", "away": missing}, 503)
        return _json({"status": "degraded" if missing else "ready", "away": missing})

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.render(registry), media_type=metrics.CONTENT_TYPE)

    @app.get("/v1/fleet")
    async def show_fleet() -> Response:
        return _json(fleet())

    return app


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
