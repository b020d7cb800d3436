"""What other servers let a client ask of an answer, and this one does not do: refused by name, where it is set.

An unknown hint is left alone, as OpenAI's API does. A field that says what the answer is must not be: its caller would
take free text for an answer in their schema, or the base model's words for an adapter's. Pure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infinilora.protocol.errors import InvalidRequest

_ADAPTER_LOOKING = re.compile(r"lora|adapter", re.IGNORECASE)

_UNSET: Sequence[Any] = (None, False, "", [], {})
"""Also 0 and 0.0, which equal False: what nearly every field is sent as by clients that mean nothing by it."""

_COMMON = (
    # an answer's form
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag"),
    *("json_schema", "regex", "ebnf", "grammar", "web_search_options", "audio"),
    # the prompt
    *("chat_template", "chat_template_kwargs", "continue_final_message", "documents", "prompt_embeds"),
    *("truncate_prompt_tokens", "prompt_logprobs", "extra_body"),
    # which tokens, and how many
    *("use_beam_search", "allowed_token_ids", "bad_words", "logits_processors", "stop_regex"),
    *("include_stop_str_in_output", "no_repeat_ngram_size", "max_new_tokens", "min_new_tokens", "n_predict"),
)
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "add_generation_prompt": (None, True),
    "length_penalty": (None, 1),
    "typical_p": (None, 1),
    "modalities": (None, [], ["text"]),
}
"""Fields that mean nothing by another value than those of `_UNSET`."""

_OF_COMPLETIONS: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("prompt", "echo", "suffix"), _UNSET),
    "best_of": (None, 1),
}
_OF_CHAT: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("messages", "max_completion_tokens", "tools", "functions", "function_call"), _UNSET),
    "top_logprobs": (None,),
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
}
_EVERYWHERE = {**dict.fromkeys(_COMMON, _UNSET), **_NEUTRAL}
REFUSED: Mapping[str, Sequence[Any]] = {**_EVERYWHERE, **_OF_COMPLETIONS, **_OF_CHAT}
"""Field -> the values that say nothing. A route's own fields are not held against it."""


def refuse_unserved(fields: Mapping[str, Any], known: Iterable[str]) -> None:
    """Of a body's fields those that are not `known` to its route. Raises InvalidRequest for the first that counts."""
    for name in fields.keys() - set(known):
        if _ADAPTER_LOOKING.search(name):
            raise _names_an_adapter("field", name)
        if name in REFUSED and fields[name] not in REFUSED[name]:
            raise InvalidRequest(f"{name} is not supported here; ignoring it would be another answer", param=name)


def refuse_query(names: Iterable[str]) -> None:
    """Of a URL's query, what seems to name a model or an adapter: the body does that. Raises InvalidRequest."""
    for name in names:
        if name.lower() == "model" or _ADAPTER_LOOKING.search(name):
            raise _names_an_adapter("query parameter", name)


def _names_an_adapter(what: str, name: str) -> InvalidRequest:
    return InvalidRequest(f"{what} '{name[:80]}' is not supported; name the adapter in 'model'", param=name[:80])
