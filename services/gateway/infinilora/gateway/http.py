"""What every route does: name the request, know the caller, read a bounded body, answer errors alike."""

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive

from infinilora.gateway.desk import Caller
from infinilora.gateway.sse import ClientGone
from infinilora.gateway.tenants import Tenants
from infinilora.protocol.errors import InfiniLoraError, Internal, InvalidRequest, TooLarge
from infinilora.runtime.metrics import GatewayMetrics
from infinilora.runtime.problems import error_response

logger = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
"""Nobody reads it; it is for the log."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")

Handler = Callable[[Request, Caller], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


class Door(NamedTuple):
    """What stands before every route of the API."""

    tenants: Tenants
    metrics: GatewayMetrics

    def endpoint(self, route: str, handler: Handler) -> Endpoint:
        """A route that knows its caller and whose errors are OpenAI error objects."""

        async def endpoint(request: Request) -> Response:
            started_s = time.perf_counter()
            request_id = _request_id(request)
            headers = {"x-request-id": request_id}
            try:
                caller = Caller(
                    tenant=self.tenants.of(request.headers.get("authorization")),
                    request_id=request_id,
                    traceparent=request.headers.get("traceparent"),
                    started_s=started_s,
                    receive=request.receive,
                )
                response = await handler(request, caller)
            except (ClientGone, ClientDisconnect):  # the second: while its body was still on the way
                return Response(status_code=CLIENT_GONE_STATUS)
            except InfiniLoraError as error:
                self.metrics.requests.labels(route=route, code=error.code).inc()
                return error_response(error, headers)
            response.headers["x-request-id"] = request_id
            return response

        endpoint.__name__ = handler.__name__
        endpoint.__doc__ = handler.__doc__
        return endpoint


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.match(given) else secrets.token_hex(12)


async def read_bounded(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises TooLarge before more than `max_bytes` have been kept."""
    _check_length(request, max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def bounded(request: Request, max_bytes: int) -> Request:
    """The same request, whose body ends in TooLarge past `max_bytes`; for bodies that go to a file."""
    _check_length(request, max_bytes)
    return Request(request.scope, _Bounded(request.receive, max_bytes))


class _Bounded:
    """A receive function that counts."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._seen = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._max_bytes:
            raise _too_large(self._max_bytes)
        return message


def _check_length(request: Request, max_bytes: int) -> None:
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {max_bytes} bytes")


async def on_http_error(_request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method, unreadable form) in our shape."""
    if not isinstance(error, HTTPException):
        raise error
    problem = InvalidRequest(str(error.detail))
    response = error_response(problem, dict(error.headers or {}))
    response.status_code = error.status_code
    return response


async def on_fault(request: Request, _error: Exception) -> Response:
    """A fault of ours. Starlette logs the traceback; the client learns nothing of it."""
    logger.error("request failed", extra={"path": request.url.path})
    return error_response(Internal("internal error"))
