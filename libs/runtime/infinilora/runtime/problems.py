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
            "type": _error_type(error),
            "param": error.param,
            "code": error.code,
        }
    }


def _error_type(error: InfiniLoraError) -> str:
    """Whose fault it is: what may succeed unchanged another time was none of the caller's."""
    if error.http_status in _TYPES:
        return _TYPES[error.http_status]
    return "server_error" if error.http_status >= 500 or error.retryable else "invalid_request_error"


def error_response(error: InfiniLoraError, headers: dict[str, str] | None = None) -> Response:
    """The whole answer. 429 and 503 always say when to come back."""
    more = dict(headers or {})
    if error.http_status in (429, 503):
        more["retry-after"] = str(max(1, math.ceil(error.retry_after_s or DEFAULT_RETRY_AFTER_S)))
    return json_response(error_body(error), status=error.http_status, headers=more)


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")
