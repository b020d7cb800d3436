"""The coordinator's HTTP: health, metrics, and the fleet as JSON. What operators do is in admin_routes.py."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry

from infinilora.runtime import metrics
from infinilora.runtime.problems import json_response


def create_app(
    *, fleet: Callable[[], dict[str, Any]], away: Callable[[], list[str]], is_ready: Callable[[], bool],
    registry: CollectorRegistry, scale: Callable[[], dict[str, Any]] = dict,
) -> FastAPI:  # fmt: skip
    """`away` names the dependencies that do not answer now; readiness does not depend on them once it was won."""
    app = FastAPI(title="InfiniLoRA coordinator", openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        return json_response({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        missing = away()
        if not is_ready():
            return json_response({"status": "starting", "away": missing}, status=503)
        return json_response({"status": "degraded" if missing else "ready", "away": missing})

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.render(registry), media_type=metrics.CONTENT_TYPE)

    @app.get("/v1/fleet")
    async def show_fleet() -> Response:
        return json_response(fleet())

    @app.get("/v1/scale")
    async def show_scale() -> Response:
        return json_response(scale())

    return app
