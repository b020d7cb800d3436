"""How an error looks to an HTTP client: the OpenAI error object, a status, and a few headers."""

import math
from typing import Any

import msgspec
from starlette.responses import Response

from infinilora.protocol.errors import InfiniLoraError

DEFAULT_RETRY_AFTER_S = 1.0

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(error: InfiniLoraError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": _error_type(error.http_status),
            "param": error.param,
            "code": error.code,
        }
    }


def _error_type(status: int) -> str:
    if status in _TYPES:
        return _TYPES[status]
    return "invalid_request_error" if status < 500 else "server_error"


def error_response(error: InfiniLoraError, headers: dict[str, str] | None = None) -> Response:
    """The whole answer. 429 and 503 always say when to come back."""
    more = dict(headers or {})
    if error.http_status in (429, 503):
        more["retry-after"] = str(max(1, math.ceil(error.retry_after_s or DEFAULT_RETRY_AFTER_S)))
    return json_response(error_body(error), status=error.http_status, headers=more)


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")
