"""Rows of the base's embedding and head that an adapter has of its own: trained tokens, and tables saved whole.

    ...MODULE.token_adapter.trainable_tokens_delta   [n, width]            trainable_token_indices: the rows themselves
    ...MODULE.weight                                 [vocabulary, width]   modules_to_save, or a copy of the whole

A row that is another than the base's adds a rank to its module: new - base, which only an engine of the base can tell.

    embedding   A [n, vocabulary] picks the row, Bt [n, width] is the difference
    head        A [n, width] is the difference, Bt [n, vocabulary] picks the column

Of tied tables PEFT lets the head follow an embedding's trained tokens; a table in modules_to_save stands for itself.
What PEFT's generations read in two ways is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from infinilora.protocol.adapter import BaseCard, Site
from infinilora.weights.config import CONFIG_FILE, LoraConfig
from infinilora.weights.copies import is_table
from infinilora.weights.facts import Facts
from infinilora.weights.factsfile import MAX_ROWS
from infinilora.weights.names import EMBED, HEAD, canonical
from infinilora.weights.peft import PeftAdapter
from infinilora.weights.plan import Pair
from infinilora.weights.refuse import invalid
from infinilora.weights.spelling import OneSpelling, plain_module
from infinilora.weights.tensorfile import Array, TensorFile

_TOKENS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\.(?P<adapter>[^.]+))?\Z")
_WHOLE = re.compile(r"(?P<module>.+)\.weight\Z")

PartKey = tuple[int, Site, int]


class Given(NamedTuple):
    """A factor [rank, in or out] that is no part of a file: it was computed from `tensor`."""

    tensor: str
    values: Array

    def read(self, _file: TensorFile) -> Array:
        return self.values


class Picked(NamedTuple):
    """A factor [n, width] with a one in each row, at `columns` [n]."""

    tensor: str
    columns: Array
    width: int

    def read(self, _file: TensorFile) -> Array:
        one_hot = np.zeros((len(self.columns), self.width), np.float32)
        one_hot[np.arange(len(self.columns)), self.columns] = 1
        return one_hot


@dataclass(frozen=True, slots=True)
class Replaced:
    """What an adapter's files replace, by module of the base; `tokens` has rows by their numbers [n]."""

    file: TensorFile
    config: LoraConfig
    card: BaseCard
    max_rank: int
    tables: dict[str, str] = field(default_factory=dict)
    """The tensors of whole tables; those that are the base's own too."""
    tokens: dict[str, str] = field(default_factory=dict)
    indices: dict[str, Array] = field(default_factory=dict)
    """By the configuration's word, whether there is a tensor or not."""

    # What is there -------------------------------------------------------------------------------

    @classmethod
    def of(cls, adapter: PeftAdapter, card: BaseCard, spelling: OneSpelling, *, max_rank: int) -> "Replaced":
        """Find it and check it, as far as that needs no weights. Raises AdapterInvalid."""
        found = cls(adapter.tensors, adapter.rules.config, card, min(max_rank, MAX_ROWS))
        for key in () if adapter.is_mlx else sorted(found.file.tensors):
            found._note(key, spelling)
        found.indices.update(_indices(found.config, card))
        found._check_saved()
        found._check_tokens()
        return found

    def rest(self) -> TensorFile:
        """The file without what is replaced."""
        own = {*self.tables.values(), *self.tokens.values()}
        return replace(self.file, tensors={key: info for key, info in self.file.tensors.items() if key not in own})

    def places(self) -> dict[PartKey, str]:
        """Module by its place, of all that has tensors."""
        return {self._place(module): module for module in (EMBED, HEAD) if module in self.tables | self.tokens}

    def _note(self, key: str, spelling: OneSpelling) -> None:
        kind, match = self.tokens, _TOKENS.match(key)
        if match is None:
            kind, match = self.tables, _WHOLE.match(key)
        module = _meant(match["module"]) if match else None
        if match is None or module is None:
            return
        spelling.module(key, match["module"], adapter=None if kind is self.tables else match["adapter"] or "")
        width, shape = self.card.hidden_dim, self.file.tensors[key].shape
        if kind is self.tables and shape != (self.card.vocab_size, width):
            raise invalid(
                self.file.name,
                f"tensor {key}",
                found=f"the whole of {module.removeprefix('model.')}, {list(shape)} "
                "(modules_to_save, or a vocabulary that was resized)",
                wanted=f"{[self.card.vocab_size, width]}: {self.card.name} has a vocabulary of {self.card.vocab_size}",
            )
        if kind is self.tokens and shape[1:] != (width,):
            raise invalid(self.file.name, f"tensor {key} shape", found=list(shape), wanted=["tokens", width])
        if module in kind:
            raise invalid(self.file.name, f"tensors {kind[module]} and {key}", found=f"both of {module}", wanted="one")
        kind[module] = key

    def _check_saved(self) -> None:
        """Every whole module that the configuration names is one of the two, and there."""
        for name in self.config.modules_to_save:
            module = _meant(name)
            if module is None:
                raise invalid(
                    CONFIG_FILE,
                    "modules_to_save",
                    found=f"{name!r:.200} (a whole module trained beside the LoRA)",
                    wanted="embed_tokens and lm_head only",
                )
            if module not in self.tables:
                raise invalid(
                    CONFIG_FILE,
                    "modules_to_save",
                    found=f"{name!r:.200}, and no tensor of it in {self.file.name}",
                    wanted=f"{module}.weight {[self.card.vocab_size, self.card.hidden_dim]}",
                )

    def _check_tokens(self) -> None:
        for module, key in self.tokens.items():
            rows, indices = self.file.tensors[key].shape[0], self.indices.get(module)
            if indices is None and module == HEAD and self._head_repeats:
                continue
            if indices is None or len(indices) != rows:
                raise self._untold(module, "no tokens" if indices is None else f"{len(indices)} tokens")
            self._check_rank(key, rows, f"{rows} trained tokens")
            if module in self.tables:
                raise invalid(
                    self.file.name, f"tensors {key} and {self.tables[module]}", found=f"both of {module}", wanted="one"
                )
        for module in self.indices.keys() - self.tokens.keys():
            follows = module == HEAD and np.array_equal(self.indices[HEAD], self.indices.get(EMBED, ()))
            if not follows:  # a head that is tied has no rows of its own in the file
                raise self._missing(module)

    def _untold(self, module: str, found: str) -> Exception:
        key = self.tokens[module]
        rows = self.file.tensors[key].shape[0]
        name = f"trainable_token_indices of {module}"
        return invalid(CONFIG_FILE, name, found=found, wanted=f"those of the {rows} rows of tensor {key}")

    @property
    def _head_repeats(self) -> bool:
        """Whether the head's rows are the embedding's once more, as `save_embedding_layers=True` saves a tied pair."""
        if not {EMBED, HEAD} <= self.tokens.keys() or EMBED not in self.indices:
            return False
        first = self.indices[EMBED]
        again = self.indices.get(HEAD, first)
        rows, repeated = (self.file.read(self.tokens[module]) for module in (EMBED, HEAD))
        return np.array_equal(first, again) and np.array_equal(rows, repeated)

    def _missing(self, module: str) -> Exception:
        return invalid(
            self.file.name,
            f"tokens of {module}",
            found=f"no tensor, where {CONFIG_FILE} has trainable_token_indices",
            wanted=f"{module}.token_adapter.trainable_tokens_delta",
        )

    def _check_rank(self, key: str, rank: int, what: str) -> None:
        if rank > self.max_rank:
            raise invalid(
                self.file.name,
                f"tensor {key}",
                found=f"{what}, each of which takes a rank",
                wanted=f"at most {self.max_rank} (INFINILORA_MAX_RANK)",
            )

    # What it comes to ----------------------------------------------------------------------------

    def pairs(self, facts: Facts, adapted: Mapping[PartKey, object]) -> dict[PartKey, Pair]:
        """The pair of each module with rows that differ. Asks `facts`, and leaves out what they do not answer yet.

        `adapted`: where the files have LoRA. Raises AdapterInvalid.
        """
        for place, module in self.places().items():
            if place in adapted:
                key = (self.tables | self.tokens)[module]
                raise invalid(
                    self.file.name, f"tensor {key}", found=f"rows of {module} beside LoRA on it", wanted="one"
                )
        found = {module: rows for module in (EMBED, HEAD) if (rows := self._rows(module, facts)) is not None}
        if facts.is_tied:
            self._check_tied(adapted)
            if EMBED in self.tokens and EMBED in found:
                found[HEAD] = found[EMBED]
        elif facts.is_answered and HEAD in self.indices.keys() - self.tokens.keys():
            raise self._missing(HEAD)
        elif facts.is_answered and HEAD in self.tokens.keys() - self.indices.keys():
            raise self._untold(HEAD, "no tokens")
        return {self._place(module): self._pair(module, *rows) for module, rows in found.items() if len(rows[1])}

    def _rows(self, module: str, facts: Facts) -> tuple[str, Array, Array] | None:
        """(tensor, numbers, new - base) of the rows that differ; None: not known yet, or nothing is there."""
        if module in self.tokens:
            if module not in self.indices:
                return None  # a head that repeats the embedding: it is tied, or refused
            key, indices = self.tokens[module], self.indices[module]
            base = facts.rows(module, indices)
            return None if base is None else _differing(key, indices, self.file.read(key), base)
        if module not in self.tables or self._is_the_bases(module):
            return None
        key = self.tables[module]
        table = self.file.read(key)
        changed = facts.changed(module, table, limit=self.max_rank)
        if changed is None:
            return None
        count = len(changed.indices)
        self._check_rank(key, count, f"{count} of {len(table)} rows that are not {self.card.name}'s")
        return _differing(key, changed.indices, table[changed.indices], changed.rows)

    def _is_the_bases(self, module: str) -> bool:
        table = self.card.tables.get(module)
        return table is not None and is_table(self.file.read(self.tables[module]), table)

    def _check_tied(self, adapted: Mapping[PartKey, object]) -> None:
        """Of a tied base: what PEFT reads in one way only."""
        named = {_meant(name) for name in self.config.modules_to_save}
        unnamed = [module for module in self.tables.keys() - named if not self._is_the_bases(module)]
        if self.tables and (unnamed or self.config.ensure_weight_tying):
            both = [self.file.read(key) for _, key in sorted(self.tables.items())]
            if len(both) != 2 or not np.array_equal(both[0], both[1]):
                raise invalid(
                    self.file.name,
                    f"tensor {min(self.tables.values())}",
                    found=f"a table of its own, where {self.card.name} has one for embedding and head",
                    wanted=f"two that are equal, or modules in modules_to_save of {CONFIG_FILE}",
                )
        has_own_tokens = HEAD in self.tokens and not self._head_repeats
        if EMBED in self.tokens and (has_own_tokens or HEAD in self.tables or self._place(HEAD) in adapted):
            raise invalid(
                self.file.name,
                f"tensor {self.tokens[EMBED]}",
                found=f"trained tokens of an embedding that {self.card.name} ties to its head, and a head of its own",
                wanted="one of them (PEFT's versions differ in what the head is then)",
            )

    def _pair(self, module: str, key: str, indices: Array, difference: Array) -> Pair:
        rows, picks = Given(key, difference), Picked(key, indices, self.card.vocab_size)
        a, bt = (picks, rows) if module == EMBED else (rows, picks)
        return Pair(a, bt, rank=len(indices), is_computed=True)

    def _place(self, module: str) -> PartKey:
        """Raises AdapterInvalid where the base's card does not offer it."""
        for site in self.card.sites:
            for number, part in enumerate(site.parts):
                if part.module == module:
                    return site.layer, site.site, number
        raise invalid(self.file.name, f"rows of {module}", found="some", wanted=f"a site that {self.card.name} offers")


def _differing(key: str, indices: Array, new: Array, base: Array) -> tuple[str, Array, Array]:
    difference = new.astype(np.float32) - base
    rows = np.flatnonzero(difference.any(axis=1))
    rows = rows[np.argsort(indices[rows], kind="stable")]
    return key, indices[rows], difference[rows]


def _meant(name: str) -> str | None:
    """The table that a name of the configuration means, as PEFT finds it: by how a module's name ends."""
    module = canonical(plain_module(name)[0])
    return module if module in (EMBED, HEAD) else None


def _indices(config: LoraConfig, card: BaseCard) -> dict[str, Array]:
    """The tokens of each table. Raises AdapterInvalid for what is no token, and for one that is named twice."""
    named = config.trainable_token_indices or {}
    by_name = {"embed_tokens": named} if isinstance(named, list) else named
    found: dict[str, Array] = {}
    for name, tokens in by_name.items():
        module = _meant(name)
        if module is None or module in found:
            raise invalid(
                CONFIG_FILE,
                "trainable_token_indices",
                found=f"{name!r:.200}",
                wanted="embed_tokens and lm_head, once each",
            )
        strange = [token for token in tokens if not 0 <= token < card.vocab_size]
        twice = len(tokens) - len(set(tokens))
        if strange or twice:
            raise invalid(
                CONFIG_FILE,
                f"trainable_token_indices of {name:.200}",
                found=f"token {strange[0]}" if strange else f"{twice} tokens a second time",
                wanted=f"tokens of {card.name}'s vocabulary of {card.vocab_size}, each once",
            )
        found[module] = np.array(tokens, np.int64)
    return found
