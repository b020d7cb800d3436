"""The admin API over HTTP: who calls, what was asked, and errors as everywhere. What acts do is in admin.py."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, get_args

import msgspec
from fastapi import FastAPI, Request, Response

from infinilora.coordinator.audit import Numbered
from infinilora.protocol.admin import Act, AdminReply, AdminRequest
from infinilora.protocol.errors import FeatureOff, InfiniLoraError, InvalidRequest, TooLarge
from infinilora.runtime.bearers import Bearers
from infinilora.runtime.problems import error_response, json_response

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 10
MAX_REASON = 500
MAX_ENTRIES = 1000
ACTS = tuple(sorted(str(kind.__struct_config__.tag) for kind in get_args(Act)))

Do = Callable[[AdminRequest], Awaitable[AdminReply]]
ReadAudit = Callable[[int, int | None], Awaitable[list[Numbered]]]


def add_admin(app: FastAPI, *, operators: Bearers, do: Do, read_audit: ReadAudit) -> None:
    """`POST /v1/admin/ACT` and `GET /v1/admin/audit`, for those who show an operator's key."""

    def who(request: Request) -> str:
        if not len(operators):
            raise FeatureOff("the admin API is off; INFINILORA_ADMIN_KEYS of the coordinator says who may use it")
        return operators.of(request.headers.get("authorization"))

    @app.get("/v1/admin/audit")
    async def audit(request: Request) -> Response:
        async def answer() -> dict[str, Any]:
            who(request)
            limit, before = _number(request, "limit", 50), _number(request, "before", 0)
            found = await read_audit(min(limit, MAX_ENTRIES), before or None)
            return {"entries": [{"number": n.number, **msgspec.to_builtins(n.entry)} for n in found]}

        return await _answered(request, answer)

    @app.post("/v1/admin/{act}")
    async def perform(act: str, request: Request) -> Response:
        async def answer() -> dict[str, object]:
            caller = who(request)
            asked = _parse(act, await _body(request), caller)
            logger.info("operator's act", extra={"who": caller, "act": act})
            return (await do(asked)).result

        return await _answered(request, answer)


async def _answered(request: Request, answer: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
    try:
        return json_response(await answer())
    except InfiniLoraError as error:
        logger.info("operator refused", extra={"path": request.url.path, "code": error.code})
        return error_response(error)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _parse(act: str, body: bytes, who: str) -> AdminRequest:
    if act not in ACTS:
        raise InvalidRequest(f"found act {act[:80]!r}; wanted one of {', '.join(ACTS)}", param="act")
    try:
        fields = msgspec.json.decode(body or b"{}", type=dict[str, Any])
        reason = msgspec.convert(fields.pop("reason", ""), str)
        asked: Act = msgspec.convert({**fields, "act": act}, Act)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body of {act} cannot be read: {error}") from None
    if len(reason) > MAX_REASON:
        raise InvalidRequest(f"found a reason of {len(reason)} letters; wanted {MAX_REASON} at most", param="reason")
    return AdminRequest(act=asked, who=who, reason=reason)


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidRequest(f"{name}: found {text[:80]!r}; wanted a whole number", param=name)
    return int(text)
