"""From token ids to text, one token at a time: bytes of a token, incremental decoding, stop strings.

Pure state machines: they know no request, no engine and no socket. What they put out does not depend on how
the tokens were spread over time, so a streamed answer and a whole one are the same text by construction.
"""

import codecs
import json
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level vocabularies use for bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    return alphabet | {chr(256 + i): b for i, b in enumerate(others)}


class TokenTable:
    """The exact bytes each token id stands for; filled as ids are met. One per tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        self._is_byte_level = "ByteLevel" in json.dumps(decoder)
        self._alphabet = _byte_alphabet()
        self._added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {}
        self._anchor = self._find_anchor()

    def is_special(self, token_id: int) -> bool:
        added = self._added.get(token_id)
        return added is not None and bool(added.special)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token writes; for a special token its name; empty for an id beyond the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._spell(token_id)
        return found

    def label(self, token_id: int) -> str:
        """The token as `logprobs` shows it; a part of a character is written `bytes:` and its bytes in hex."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content).encode()
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes(self._alphabet[c] for c in piece if c in self._alphabet)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        both = self._decode([*self._anchor, token_id])
        return both[len(self._decode(self._anchor)) :].encode()

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _find_anchor(self) -> list[int]:
        """A plain token to stand before another, since decoders treat the first of a text differently."""
        for token_id in range(self._tokenizer.get_vocab_size()):
            if token_id not in self._added and self._decode([token_id]).isalnum():
                return [token_id]
        return []


class TextDecoder:
    """Turns one sequence's tokens into text; a character comes out when its last byte has come in."""

    def __init__(self, table: TokenTable, *, skip_special: bool) -> None:
        self._table = table
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if self._skip_special and self._table.is_special(token_id):
            return ""
        return self._utf8.decode(self._table.token_bytes(token_id))

    @property
    def is_mid_character(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """The end: a character that was cut short becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


def decode_all(table: TokenTable, token_ids: Sequence[int]) -> str:
    decoder = TextDecoder(table, skip_special=False)
    return "".join(map(decoder.push, token_ids)) + decoder.flush()


class Cut(NamedTuple):
    """Text that may be shown, and whether a stop string ends the answer behind it."""

    text: str
    stopped: bool


class StopMatcher:
    """Finds the earliest stop string in a growing text, and holds back what may be the start of one.

    `earliest` is by where it begins: while a stop that began earlier may still complete, a shorter one inside
    it does not cut. So the cut is that of a search over the whole text, however the text came in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def push(self, text: str) -> Cut:
        if not self._stops:
            return Cut(text, stopped=False)
        self._held += text
        match, candidate = self._match(), self._candidate()
        if match is not None and (candidate is None or match <= candidate):
            return self._release(match, stopped=True)
        return self._release(len(self._held) if candidate is None else candidate, stopped=False)

    def flush(self) -> Cut:
        """The text is complete: candidates have failed, and a match inside one now cuts."""
        match = self._match()
        return self._release(len(self._held) if match is None else match, stopped=match is not None)

    def _release(self, end: int, *, stopped: bool) -> Cut:
        text, self._held = self._held[:end], "" if stopped else self._held[end:]
        return Cut(text, stopped)

    def _match(self) -> int | None:
        """Where the earliest complete stop begins."""
        return min((i for stop in self._stops if (i := self._held.find(stop)) >= 0), default=None)

    def _candidate(self) -> int | None:
        """Where the earliest suffix begins that more text could make into a stop."""
        return min((i for stop in self._stops if (i := self._suffix(stop)) is not None), default=None)

    def _suffix(self, stop: str) -> int | None:
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return len(self._held) - length
        return None
