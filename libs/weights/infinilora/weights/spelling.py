"""How a file spells what is around its modules' names: one way in all of it, be it of pairs, tables, tokens or copies.

    [wrappers.][prefix] ROOT layers.0.self_attn.q_proj     ROOT: where the layers are in the model that was trained
    [wrappers.][prefix] ROOT embed_tokens
    [wrappers.][prefix] HOME lm_head                       HOME: where the language model is in that, if it is a part

Two ways in one file are two adapters, or one of which PEFT would silently drop a part.
"""

import re
from typing import NamedTuple

from infinilora.weights.names import HEAD, ROOT
from infinilora.weights.refuse import invalid

# Names that compilers and sharders put in between, and what may come before a module's name, once or twice.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PREFIX = re.compile(r"\A(?:module\.|base_model\.model\.(?=.))*")
_LARGER = "language_model.model."
"""What a root ends in where a larger model holds a language model with its head."""


class Spelling(NamedTuple):
    """How a key is written around its module's name. None: this key does not tell."""

    prefix: str
    root: str | None = None
    home: str | None = None
    adapter: str | None = None


_MEANING = Spelling(
    "names that begin with",
    "layers below",
    "a language model, by its layers or its head, below",
    "tensors of the adapter named",
)


def plain_module(name: str) -> tuple[str, str]:
    """A module's name without what was wrapped around it, and the prefix that it had."""
    unwrapped = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    module = _PREFIX.sub("", unwrapped)
    return module, unwrapped.removesuffix(module)


class OneSpelling:
    """Holds the keys of one file to one spelling. Between calls: the first key that told each thing, and it."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._first: dict[str, tuple[str, str]] = {}

    def module(self, key: str, name: str, *, adapter: str | None = None) -> str:
        """The plain module of a key that has it as `name`. Raises AdapterInvalid where an earlier key is unlike."""
        module, prefix = plain_module(name)
        self._check(key, Spelling(prefix, *_places(module), adapter))
        return module

    def _check(self, key: str, spelling: Spelling) -> None:
        for what, value, meaning in zip(Spelling._fields, spelling, _MEANING, strict=True):
            if value is None:
                continue
            earlier_key, earlier = self._first.setdefault(what, (key, value))
            if value != earlier:
                raise invalid(
                    self._file,
                    f"tensors {earlier_key} and {key}",
                    found=f"{meaning} {earlier!r} and {value!r} in one file",
                    wanted="one of them (PEFT's own names begin with 'base_model.model.')",
                )


def _places(module: str) -> tuple[str | None, str | None]:
    """(root, home) as far as a module's name has them."""
    if found := ROOT.match(module):
        root = found["root"]
        return root, root.removesuffix("model.") if root.endswith(_LARGER) else ""
    parent, dot, leaf = module.rpartition(".")
    return None, parent + dot if leaf == HEAD else None
