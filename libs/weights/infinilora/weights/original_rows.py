"""Replaced rows read a second time: the self-test's own road from a file's tables and tokens to what they add.

Takes the base's rows from the engine's answers, since there is no second base to ask, and nothing from the plan: it
finds tensors, tokens and what a tied head does for itself, and hashes a table that nobody was asked about.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import Internal
from infinilora.weights.factsfile import read_answer
from infinilora.weights.tensorfile import NUMPY_DTYPES, Array

_KEY = re.compile(
    r"(.*\.)?(?P<table>embed_tokens|lm_head)\.((?P<whole>weight)|token_adapter\.trainable_tokens_delta(\.[^.]+)?)$"
)
_MODULES = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}

Read = Callable[[str], Array]
"""A tensor of the file as it lies there."""


class RowTerm(NamedTuple):
    """Of a module of the base: b·(a·x) is what its replaced rows add; a [rank, in], b [out, rank], float64."""

    module: str
    a: Array
    b: Array


def is_of_rows(key: str) -> bool:
    """Whether a tensor holds rows of a table, and no half of a pair."""
    return _KEY.match(key) is not None


class Rows:
    """The tensors of an adapter's file that hold rows of the base's tables, and what its engine says of those."""

    def __init__(self, config: Mapping[str, Any], keys: Iterable[str], card: BaseCard, facts: Path | None) -> None:
        self._card, self._tokens = card, _tokens(config)
        self._keys = {key: found for key in sorted(keys) if (found := _KEY.match(key))}
        self._bases: dict[tuple[str, str], tuple[Array, Array]] = {}
        self._is_tied = False
        if facts is not None:
            head, file = read_answer(facts)
            self._is_tied = head.is_tied
            for name, ask in head.asks.items():
                if ask.kind != "norms":
                    tokens = self._tokens.get(ask.module, ())
                    numbers = file.read(f"{name}.indices") if ask.kind == "changed" else np.array(tokens, np.int64)
                    self._bases[ask.kind, ask.module] = numbers, file.read(f"{name}.rows")

    def terms(self, read: Read) -> Iterator[RowTerm]:
        """What each table's rows add. Raises Internal where the base was not asked about one that is not its own."""
        for key, found in self._keys.items():
            module = _MODULES[found["table"]]
            kind = "changed" if found["whole"] else "rows"
            if self._is_tied and module == "lm_head" and kind == "rows" and self._repeats(read, key):
                continue
            if (kind, module) in self._bases:
                numbers, base = self._bases[kind, module]
                tensor = read(key)
                rows = tensor[numbers] if found["whole"] else tensor
                added = rows.astype(np.float64) - base.astype(np.float64)
                yield self._term(module, numbers, added)
                if kind == "rows" and found["table"] == "embed_tokens" and self._is_tied:
                    yield self._term("lm_head", numbers, added)
            elif not found["whole"] or _sha256(read(key), self._card, module) != self._card.tables[module].sha256:
                raise Internal(
                    f"self-test: tensor {key}: found rows that nobody was asked about; wanted the base's own"
                )

    def _repeats(self, read: Read, head: str) -> bool:
        """Whether a tied head's rows are those of the embedding, which has said already what they add."""
        first = [key for key, found in self._keys.items() if found["table"] == "embed_tokens" and not found["whole"]]
        return bool(first) and np.array_equal(read(first[0]), read(head))

    def _term(self, module: str, numbers: Array, added: Array) -> RowTerm:
        places = np.zeros((len(numbers), self._card.vocab_size))
        places[np.arange(len(numbers)), numbers] = 1.0
        return RowTerm(module, added, places.T) if module == "lm_head" else RowTerm(module, places, added.T)


def _tokens(config: Mapping[str, Any]) -> dict[str, list[int]]:
    given = config.get("trainable_token_indices") or {}
    named = {"embed_tokens": given} if isinstance(given, list) else given
    return {_MODULES[name.rpartition(".")[2]]: list(tokens) for name, tokens in named.items()}


def _sha256(table: Array, card: BaseCard, module: str) -> str:
    """Of a table's values in the dtype that the base keeps them in."""
    state, kind = hashlib.sha256(), NUMPY_DTYPES[card.tables[module].dtype]
    for row in table:
        state.update(row.astype(kind).tobytes())
    return state.hexdigest()
