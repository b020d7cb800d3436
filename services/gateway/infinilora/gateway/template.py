"""Chat templates: a base model's Jinja text, rendered in a sandbox.

The template comes with the base model and with nothing else: an adapter cannot bring one. It sees the
messages and the special tokens, and can neither reach files nor change what it is given.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from infinilora.protocol.errors import InvalidRequest


class ChatTemplate:
    """One compiled template. Raises InvalidRequest with the template's own complaint."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _complain
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the base model's chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise InvalidRequest(f"chat template: {error}", param="messages") from None


def read_template(jinja_file: str | None, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of `chat_template.jinja`, else of the tokenizer's configuration, else none."""
    source = jinja_file or _configured(tokenizer_config.get("chat_template"))
    return ChatTemplate(source, special_tokens(tokenizer_config)) if source else None


def _configured(entry: Any) -> str | None:
    """A configuration holds one template, or a list of named ones of which `default` is meant."""
    if isinstance(entry, list):
        entry = {e.get("name"): e.get("template") for e in entry if isinstance(e, dict)}.get("default")
    return entry if isinstance(entry, str) else None


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like; each is written as a string, or as an object with `content`."""
    found = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _complain(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
