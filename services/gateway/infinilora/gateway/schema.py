"""What clients may write in a request body, and its translation into the engine's sampling.

Field names, defaults and ranges are OpenAI's; what we add is named as other open servers name it. Fields we
do not know are hints, and ignored, except those of `unserved`.
"""

import re
import secrets
from typing import Any, Literal, TypeVar

import msgspec

from infinilora.gateway.unserved import refuse_unserved
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.generate_pb2 import Sampling
from infinilora.protocol.ids import SloClass

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_LOGPROBS = 20
MAX_BIASES = 1024
_U64 = (1 << 64) - 1
_LEAST_TOP_P = 2.0**-126
"""The least that stays itself in single precision, where less may become 0, which engines read as off."""

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`\Z")
_ID = re.compile(r"(0|[1-9][0-9]{0,18})\Z")
"""A token id in its one spelling: two keys of one id would be two biases."""
_STRAY = re.compile(r"(?P<what>missing required|unknown) field `(?P<name>[^`]+)`")


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: send the totals in a last chunk of their own."""

    include_usage: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat completions share."""

    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    lora_fallback: Literal["base", "none"] | None = None
    return_token_ids: bool | None = None
    slo_class: SloClass | None = None
    user: str | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is checked by `completions.read_prompts`."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. `content` is text, or a list of text parts."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Only `text` is served."""

    type: str


class ChatBody(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: ResponseFormat | None = None


B = TypeVar("B", bound=Body)


def read_body(kind: type[B], raw: bytes) -> B:
    """Parse and check a body. Raises InvalidRequest that names the field."""
    try:
        fields = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    refuse_unserved(fields, kind.__struct_fields__)
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise misfit(error) from None
    _check_ranges(body)
    return body


def misfit(error: msgspec.ValidationError) -> InvalidRequest:
    """The decoder's words, with the field they speak of as `param`."""
    path = _PATH.search(str(error))
    param = path["path"] if path else ""
    words = _PATH.sub("", str(error))
    if stray := _STRAY.search(words):
        name = f"{param}.{stray['name']}" if param else stray["name"]
        is_missing = "missing" in stray["what"]
        return InvalidRequest(f"field '{name[:80]}' is {'missing' if is_missing else 'not known'}", param=name[:80])
    return InvalidRequest(f"{param}: {words}" if param else words, param=param or None)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, MAX_CHOICES),
    ("max_tokens", 0, float("inf")),
    ("max_completion_tokens", 1, float("inf")),
    ("min_tokens", 0, float("inf")),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, (1 << 31) - 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 100),
    ("top_logprobs", 0, MAX_LOGPROBS),
)


def _check_ranges(body: Body) -> None:
    for name, low, high in _RANGES:
        value = getattr(body, name, None)
        if value is not None and not low <= value <= high:
            top = f" to {high:g}" if high != float("inf") else " or more"
            raise InvalidRequest(f"{name} is {value}; wanted {low:g}{top}", param=name)
    if body.top_p == 0:
        raise InvalidRequest("top_p is 0; wanted more than 0 and at most 1", param="top_p")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream=true", param="stream_options")


def stop_strings(body: Body) -> tuple[str, ...]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(
            f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters", param="stop"
        )
    return tuple(stops)


def sampling(body: Body, *, max_tokens: int, vocab_size: int, logprobs: int, prompt_logprobs: int) -> Sampling:
    """The engine's sampling parameters for choice 0.

    A request without a seed gets one, so that it can be continued exactly on another engine.
    """
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else max(body.top_p, _LEAST_TOP_P),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        seed=secrets.randbits(63) if body.seed is None else body.seed & _U64,
        stop_token_ids=[_token_id(i, vocab_size, "stop_token_ids") for i in body.stop_token_ids or ()],
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min(body.min_tokens or 0, max_tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_biases(body.logit_bias or {}, vocab_size),
    )


def with_choice(base: Sampling, choice: int) -> Sampling:
    """The sampling of one of n choices: seed + its index, so that choice i can be asked for alone."""
    derived = Sampling()
    derived.CopyFrom(base)
    derived.seed = (base.seed + choice) & _U64
    return derived


def _biases(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(biases) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias has {len(biases)} entries; at most {MAX_BIASES}", param="logit_bias")
    if any(not -100 <= value <= 100 for value in biases.values()):
        raise InvalidRequest("logit_bias values must lie between -100 and 100", param="logit_bias")
    if not all(_ID.match(key) for key in biases):
        raise InvalidRequest("logit_bias keys must be token ids, as '0' or '123'", param="logit_bias")
    ids = [int(key) for key in biases]
    return {_token_id(i, vocab_size, "logit_bias"): bias for i, bias in zip(ids, biases.values(), strict=True)}


def _token_id(value: int, vocab_size: int, param: str) -> int:
    if not 0 <= value < vocab_size:
        raise InvalidRequest(f"{param}: token id {value} is not in 0 to {vocab_size - 1}", param=param)
    return value
