"""A request that has been understood: which model, which prompts, how many choices, and within what limits.

Built by `completions` and `chat`, run by `answer`. Choices are numbered prompt by prompt: choice i belongs to
prompt i // n and its seed is the request's plus i % n, so that each can be asked for alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infinilora.gateway.bases import Base
from infinilora.gateway.choice import Choice
from infinilora.gateway.progress import Job
from infinilora.gateway.schema import MAX_CHOICES, Body, sampling, stop_strings, with_choice
from infinilora.protocol.errors import ContextLengthExceeded, InvalidRequest
from infinilora.protocol.ids import Digest, Fingerprint, SloClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a `model` field means: a base, and for an adapter the digest its request is bound to for good."""

    requested: str
    base: Fingerprint
    digest: Digest | None = None
    tenant: str = ""
    name: str = ""
    allows_base: bool = False
    """The adapter's owner accepts base output when the adapter cannot be served."""

    @property
    def full_name(self) -> str:
        return f"{self.tenant}/{self.name}"


class Prompt(NamedTuple):
    """Token ids, and the text they were made from if the client sent text."""

    ids: tuple[int, ...]
    text: str | None


class Limits(NamedTuple):
    """Of one request: seconds in all, and seconds to look for an engine."""

    deadline: float
    patience_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything needed to run a request and to shape its answer."""

    request_id: str
    target: Target
    base: Base
    prompts: tuple[Prompt, ...]
    body: Body
    limits: Limits
    max_tokens: int | None
    logprobs: int
    echo: bool = False
    slo_class: SloClass = "standard"
    """As engines are told: that of the body, or one up for an adapter in a hurry."""

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs >= 0

    @property
    def wants_usage_chunk(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def shows_ids(self) -> bool:
        """Without a tokenizer the ids are the answer."""
        return self.base.table is None or bool(self.body.return_token_ids)

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    def job(self, index: int) -> Job:
        prompt, card = self.prompt_of(index), self.base.card
        room = card.max_model_len - len(prompt.ids)
        parameters = sampling(
            self.body,
            max_tokens=room if self.max_tokens is None else self.max_tokens,
            vocab_size=card.vocab_size,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else -1,
        )
        return Job(
            request_id=self.request_id if self.num_choices == 1 else f"{self.request_id}-{index}",
            base=self.target.base,
            digest=self.target.digest,
            prompt=prompt.ids,
            sampling=with_choice(parameters, index % self.n),
            slo_class=self.slo_class,
            fallback_base=self.body.lora_fallback == "base"
            or (self.body.lora_fallback is None and self.target.allows_base),
            deadline=self.limits.deadline,
            patience_s=self.limits.patience_s,
        )

    def choice(self) -> Choice:
        stop_ids = set(self.body.stop_token_ids or ())
        if not self.body.ignore_eos:
            stop_ids |= set(self.base.card.eos_token_ids)
        return Choice(
            self.base.table,
            stops=stop_strings(self.body),
            stop_ids=stop_ids,
            skip_special=self.body.skip_special_tokens is not False,
        )


def check_plan(plan: Plan, *, max_tokens_field: str) -> Plan:
    """Refuse, before any work, what cannot be run. `max_tokens_field` is the name the client used."""
    if plan.num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(plan.prompts)} prompts with n={plan.n} make {plan.num_choices} choices; at most {MAX_CHOICES}",
            param="n",
        )
    if plan.base.table is None and stop_strings(plan.body):
        raise InvalidRequest(f"base model '{plan.base.card.name}' has no tokenizer; use stop_token_ids", param="stop")
    if plan.body.lora_fallback == "base" and plan.target.digest is None:
        raise InvalidRequest("lora_fallback is for adapters; this is a base model", param="lora_fallback")
    for prompt in plan.prompts:
        _check_length(prompt.ids, plan, max_tokens_field)
    plan.job(0)  # token ids of stop_token_ids and logit_bias are checked as sampling is built
    plan.choice()
    return plan


def _check_length(ids: Sequence[int], plan: Plan, max_tokens_field: str) -> None:
    limit, wanted = plan.base.card.max_model_len, plan.max_tokens
    if not ids:
        raise InvalidRequest("the prompt is empty; wanted at least one token", param="prompt")
    if wanted is not None and len(ids) + wanted > limit:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limit} tokens; the prompt has {len(ids)} and "
            f"{max_tokens_field} asks for {wanted}: {len(ids) + wanted} in all",
            param=max_tokens_field,
        )
    if wanted is None and len(ids) >= limit:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limit} tokens; the prompt has {len(ids)} "
            "and leaves no room for an answer",
            param="messages" if max_tokens_field == "max_completion_tokens" else "prompt",
        )
