"""What the gateway knows of a base model: its card, its tokenizer, its chat template.

All of it comes from the object store, where an engine put it under the model's fingerprint. The weights behind
a fingerprint never change, but limits and files may: an engine that was started anew writes the card again, and
`refresh` sees it. A base without tokenizer files serves token-id prompts only.
"""

import asyncio
import json
from functools import partial

import msgspec
from tokenizers import Tokenizer

from infinilora.gateway.template import ChatTemplate, read_template
from infinilora.gateway.text import TokenTable, decode_all
from infinilora.protocol import keys
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from infinilora.protocol.ids import Fingerprint
from infinilora.runtime.blobs import BlobStore

LONG_TEXT_CHARS = 8192
"""Longer texts are tokenised beside the event loop, so that other streams do not wait."""


class Base:
    """One base model, as far as text is concerned. Immutable."""

    def __init__(
        self,
        card: BaseCard,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        *,
        template_fault: str = "",
    ) -> None:
        self.card = card
        self.table = TokenTable(tokenizer) if tokenizer else None
        self._tokenizer = tokenizer
        self._template = template
        self._template_fault = template_fault

    async def encode(self, text: str, *, param: str, add_special: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer itself adds, or without."""
        if self._tokenizer is None:
            raise InvalidRequest(
                f"base model '{self.card.name}' has no tokenizer; send the prompt as token ids", param=param
            )
        if len(text) < LONG_TEXT_CHARS:
            encoded = self._tokenizer.encode(text, add_special_tokens=add_special)
        else:
            # As a batch of one: only a batch is encoded without Python's lock, which every stream waits for.
            batch = partial(self._tokenizer.encode_batch_fast, add_special_tokens=add_special)
            [encoded] = await asyncio.to_thread(batch, [text])
        self.check_fits(len(encoded), param=param)  # before millions of ids are numbers of Python's
        return list(encoded.ids)

    def check_fits(self, num: int, what: str = "tokens", *, param: str) -> None:
        """Raise ContextLengthExceeded for so many of what is a token at least each: whatever else is asked for."""
        limit = self.card.max_model_len
        if num > limit:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {limit} tokens; the prompt has {num} {what} "
                "and leaves no room for an answer",
                param=param,
            )

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens included; empty without a tokenizer."""
        return decode_all(self.table, token_ids) if self.table else ""

    def label(self, token_id: int, *, as_id: bool = False) -> str:
        """How `logprobs` names a token."""
        return f"token_id:{token_id}" if as_id or self.table is None else self.table.label(token_id)

    def render(self, messages: list[dict[str, str]]) -> str:
        if self._template is None:
            fault = self._template_fault or f"base model '{self.card.name}' has no chat template"
            raise InvalidRequest(f"{fault}; use /v1/completions", param="messages")
        return self._template.render(messages)


class BaseShelf:
    """Every base model met so far. Reads of one fingerprint are shared; a failed one is tried again."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._known: dict[Fingerprint, Base] = {}
        self._locks: dict[Fingerprint, asyncio.Lock] = {}

    def has(self, fingerprint: Fingerprint) -> bool:
        return fingerprint in self._known

    async def get(self, fingerprint: Fingerprint) -> Base:
        """Raises Unavailable when the store has no card of this base, or does not answer."""
        if (known := self._known.get(fingerprint)) is not None:
            return known
        async with self._locks.setdefault(fingerprint, asyncio.Lock()):
            if fingerprint not in self._known:
                self._known[fingerprint] = await asyncio.to_thread(_read_base, self._blobs, fingerprint)
        return self._known[fingerprint]

    async def refresh(self, fingerprint: Fingerprint) -> None:
        """Read a base again if its card has changed. Raises Unavailable, and keeps what is known."""
        known = await self.get(fingerprint)
        if await asyncio.to_thread(_read_card, self._blobs, fingerprint) != known.card:
            self._known[fingerprint] = await asyncio.to_thread(_read_base, self._blobs, fingerprint)


def _read_card(blobs: BlobStore, fingerprint: Fingerprint) -> BaseCard:
    try:
        return msgspec.json.decode(blobs.get(keys.base_card(fingerprint)), type=BaseCard)
    except FileNotFoundError as error:
        raise Unavailable(f"the store has no card of this base model yet: {error}") from None
    except msgspec.DecodeError as error:
        raise Unavailable(f"the base model's card cannot be read: {error}") from None


def _read_base(blobs: BlobStore, fingerprint: Fingerprint) -> Base:
    card = _read_card(blobs, fingerprint)
    try:
        files = {name: blobs.get(keys.base_file(fingerprint, name)) for name in card.tokenizer_files}
    except FileNotFoundError as error:
        raise Unavailable(f"the base model's files are not complete in the store: {error}") from None
    try:
        tokenizer = Tokenizer.from_buffer(files["tokenizer.json"]) if "tokenizer.json" in files else None
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        jinja = files.get("chat_template.jinja", b"").decode()
    except ValueError as error:
        raise Unavailable(f"the tokenizer files of base model '{card.name}' cannot be read: {error}") from None
    if tokenizer is not None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
    try:
        template = read_template(jinja or None, config if isinstance(config, dict) else {})
    except InvalidRequest as error:
        return Base(card, tokenizer, template_fault=error.message)  # completions can be served
    return Base(card, tokenizer, template)
