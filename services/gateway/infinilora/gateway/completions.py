"""/v1/completions: what a `prompt` may be, and how the answer looks, whole and as chunks."""

from typing import Any

from infinilora.gateway.bases import Base
from infinilora.gateway.choice import Delta, Scored, Shown
from infinilora.gateway.plan import Limits, Plan, Prompt, Target, check_plan
from infinilora.gateway.schema import MAX_CHOICES, MAX_LOGPROBS, CompletionBody
from infinilora.gateway.text import TextDecoder
from infinilora.protocol.errors import InvalidRequest


async def plan_completion(body: CompletionBody, *, request_id: str, target: Target, base: Base, limits: Limits) -> Plan:
    """Check the body against the model. Raises InvalidRequest naming the field."""
    _check(body)
    plan = Plan(
        request_id=request_id,
        target=target,
        base=base,
        prompts=await _read_prompts(body.prompt, base),
        body=body,
        limits=limits,
        max_tokens=body.max_tokens,
        logprobs=-1 if body.logprobs is None else body.logprobs,
        echo=bool(body.echo),
    )
    return check_plan(plan, max_tokens_field="max_tokens")


def _check(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of is not supported; use n", param="best_of")
    if body.suffix:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs is {body.logprobs}; wanted 0 to {MAX_LOGPROBS}", param="logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0; that is for scoring a prompt, with echo=true", param="max_tokens")


async def _read_prompts(prompt: Any, base: Base) -> tuple[Prompt, ...]:
    """Text, a list of texts, token ids, or a list of lists of token ids."""
    texts: list[str] = []
    id_lists: list[list[Any]] = []
    match prompt:
        case str():
            texts = [prompt]
        case [str(), *_] if all(isinstance(p, str) for p in prompt):
            texts = prompt
        case [int(), *_] if not isinstance(prompt[0], bool):
            id_lists = [prompt]
        case [list(), *_] if all(isinstance(p, list) for p in prompt):
            id_lists = prompt
        case []:
            raise InvalidRequest("the prompt is empty; wanted at least one token", param="prompt")
        case _:
            raise InvalidRequest(
                "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
                param="prompt",
            )
    if len(texts) + len(id_lists) > MAX_CHOICES:
        raise InvalidRequest(f"more than {MAX_CHOICES} prompts in one request", param="prompt")
    if not all(texts):
        raise InvalidRequest("the prompt is empty; wanted at least one token", param="prompt")
    encoded = [Prompt(tuple(await base.encode(text, param="prompt")), text) for text in texts]
    for ids in id_lists:
        base.check_fits(len(ids), param="prompt")  # first: to look at millions of ids takes longer
    return (*encoded, *(Prompt(_check_ids(ids, base.card.vocab_size), None) for ids in id_lists))


def _check_ids(ids: list[Any], vocab_size: int) -> tuple[int, ...]:
    for position, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"prompt: found {str(token_id)[:40]!r} at position {position}; "
                f"wanted a token id from 0 to {vocab_size - 1}",
                param="prompt",
            )
    return tuple(ids)


class CompletionShape:
    """Writes one request's answer as completions look. Keeps where each choice's text stands."""

    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._echo_chars = [0] * plan.num_choices

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream begins with; completions begin with their text."""
        del index
        return None

    def echo(self, index: int, scored: tuple[Scored, ...]) -> dict[str, Any]:
        """The prompt, as the beginning of a choice's text; `scored` is empty without logprobs."""
        prompt = self._plan.prompt_of(index)
        text = self._plan.base.decode(list(prompt.ids)) if prompt.text is None else prompt.text
        self._echo_chars[index] = len(text)
        shown = self._place(scored, skip_special=prompt.text is not None) if scored else ()
        return self._part(index, text, shown, offset=0, finish_reason=None, ids=())

    def delta(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        ids = tuple(shown.token.id for shown in delta.tokens)
        if not delta.text and not delta.finish_reason and not (ids and self._shows_tokens):
            return []
        offset = self._echo_chars[index]
        return [self._part(index, delta.text, delta.tokens, offset, delta.finish_reason, ids)]

    def join(self, index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """All parts of a choice as one."""
        whole = self._part(index, "".join(p["text"] for p in parts), (), 0, parts[-1]["finish_reason"], ())
        if self._plan.wants_logprobs:
            kinds = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            whole["logprobs"] = {k: [item for p in parts for item in p["logprobs"][k]] for k in kinds}
        if self._plan.shows_ids:
            whole["token_ids"] = [i for p in parts for i in p["token_ids"]]
        if self._plan.body.return_token_ids:
            whole["prompt_token_ids"] = list(self._plan.prompt_of(index).ids)
        return whole

    @property
    def _shows_tokens(self) -> bool:
        return self._plan.shows_ids or self._plan.wants_logprobs

    def _part(
        self,
        index: int,
        text: str,
        tokens: tuple[Shown, ...],
        offset: int,
        finish_reason: str | None,
        ids: tuple[int, ...],
    ) -> dict[str, Any]:
        part: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens, offset) if self._plan.wants_logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._plan.shows_ids:
            part["token_ids"] = ids
        return part

    def _logprobs(self, tokens: tuple[Shown, ...], offset: int) -> dict[str, Any]:
        return {
            "tokens": [self._label(shown.token.id) for shown in tokens],
            "token_logprobs": [shown.token.logprob for shown in tokens],
            "top_logprobs": [self._top(shown.token) for shown in tokens],
            "text_offset": [offset + shown.offset for shown in tokens],
        }

    def _top(self, token: Scored) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.id, token.logprob)):
            top.setdefault(self._label(token_id), logprob)
        return top

    def _label(self, token_id: int) -> str:
        return self._plan.base.label(token_id)

    def _place(self, scored: tuple[Scored, ...], *, skip_special: bool) -> tuple[Shown, ...]:
        """Where each prompt token's text begins; special tokens that a tokenizer added have no width."""
        if self._plan.base.table is None:
            return tuple(Shown(token, 0) for token in scored)
        decoder, at, shown = TextDecoder(self._plan.base.table, skip_special=skip_special), 0, []
        for token in scored:
            shown.append(Shown(token, at))
            at += len(decoder.push(token.id))
        return tuple(shown)
