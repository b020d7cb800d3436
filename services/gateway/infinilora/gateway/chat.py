"""/v1/chat/completions: messages to a prompt by the base model's template, and how the answer looks."""

from typing import Any

from infinilora.gateway.bases import Base
from infinilora.gateway.choice import Delta, Scored, Shown
from infinilora.gateway.plan import Limits, Plan, Prompt, Target, check_plan
from infinilora.gateway.schema import ChatBody, ChatMessage
from infinilora.protocol.errors import InvalidRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles that are served, and what a template calls them."""


async def plan_chat(body: ChatBody, *, request_id: str, target: Target, base: Base, limits: Limits) -> Plan:
    """Check the body, render the template and tokenise. Raises InvalidRequest naming the field."""
    _check(body)
    base.check_fits(len(body.messages), "messages", param="messages")
    messages = [_read_message(message, i) for i, message in enumerate(body.messages)]
    text = base.render(messages)
    # The template writes the special tokens itself; the tokenizer must not add them again.
    ids = await base.encode(text, param="messages", add_special=False)
    max_tokens, field = _max_tokens(body)
    plan = Plan(
        request_id=request_id,
        target=target,
        base=base,
        prompts=(Prompt(tuple(ids), text),),
        body=body,
        limits=limits,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
    )
    return check_plan(plan, max_tokens_field=field)


def _check(body: ChatBody) -> None:
    for name in ("tools", "tool_choice", "functions", "function_call"):
        if getattr(body, name) not in (None, [], "none"):
            raise InvalidRequest(f"{name} is not supported", param=name)
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            f"response_format '{body.response_format.type}' is not supported; wanted 'text'",
            param="response_format",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if not body.messages:
        raise InvalidRequest("messages is empty; wanted at least one", param="messages")


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The limit and the field that set it: `max_completion_tokens`, or `max_tokens` as it was called before."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    if body.max_tokens == 0:
        raise InvalidRequest("max_tokens is 0; wanted 1 or more", param="max_tokens")
    return body.max_tokens, "max_completion_tokens" if body.max_tokens is None else "max_tokens"


def _read_message(message: ChatMessage, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{where}: role '{message.role[:40]}' is not supported; wanted one of {', '.join(ROLES)}",
            param="messages",
        )
    if message.tool_calls or message.function_call:
        raise InvalidRequest(f"{where}: tool calls are not supported", param="messages")
    return {"role": ROLES[message.role], "content": _read_content(message.content, where)}


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "\n".join(_read_part(part, where) for part in content)
    raise InvalidRequest(f"{where}: content must be a string or a list of text parts", param="messages")


def _read_part(part: Any, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise InvalidRequest(f"{where}: a text part must have a 'text' that is a string", param="messages")
        case {"type": str(kind)}:
            raise InvalidRequest(
                f"{where}: content of type '{kind[:40]}' is not supported; wanted 'text'", param="messages"
            )
        case _:
            raise InvalidRequest(f"{where}: a content part must be an object with a type", param="messages")


class ChatShape:
    """Writes one request's answer as chat completions look."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def opening(self, index: int) -> dict[str, Any] | None:
        """A stream names the role before anything else."""
        return self._part(index, {"role": "assistant", "content": ""})

    def echo(self, index: int, scored: tuple[Scored, ...]) -> dict[str, Any]:
        raise NotImplementedError("chat has no echo")

    def delta(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The text, then the end as a part of its own: some clients read no text from a part that ends."""
        parts = []
        if delta.text or (delta.tokens and (self._plan.wants_logprobs or self._plan.shows_ids)):
            parts.append(self._part(index, {"content": delta.text}, delta.tokens))
        if delta.finish_reason:
            parts.append(self._part(index, {}, (), delta.finish_reason))
        return parts

    def join(self, index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
        content = "".join(p["delta"].get("content", "") for p in parts)
        whole: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": None,
            "finish_reason": parts[-1]["finish_reason"],
        }
        if self._plan.wants_logprobs:
            items = [item for p in parts if p["logprobs"] for item in p["logprobs"]["content"]]
            whole["logprobs"] = {"content": items, "refusal": None}
        if self._plan.shows_ids:
            whole["token_ids"] = [i for p in parts for i in p["token_ids"]]
        if self._plan.body.return_token_ids:
            whole["prompt_token_ids"] = list(self._plan.prompt_of(index).ids)
        return whole

    def _part(
        self,
        index: int,
        message: dict[str, Any],
        tokens: tuple[Shown, ...] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        has_logprobs = bool(tokens) and self._plan.wants_logprobs
        part: dict[str, Any] = {
            "index": index,
            "delta": message,
            "logprobs": {"content": [self._logprob(s.token) for s in tokens]} if has_logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._plan.shows_ids:
            part["token_ids"] = [shown.token.id for shown in tokens]
        return part

    def _logprob(self, token: Scored) -> dict[str, Any]:
        limit = self._plan.logprobs
        return self._entry(token.id, token.logprob) | {
            "top_logprobs": [self._entry(i, logprob) for i, logprob in token.top[:limit]]
        }

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        table = self._plan.base.table
        raw = list(table.token_bytes(token_id)) if table else None
        return {"token": self._plan.base.label(token_id), "logprob": logprob, "bytes": raw}
