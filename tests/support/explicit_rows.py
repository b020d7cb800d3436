"""What tables an adapter's files make of a base's, by hand: PEFT's meaning of trained tokens and of whole modules.

The oracle of replaced rows. It reads the files with safetensors, takes the base's two tables as arrays, and shares no
code with what it checks. What PEFT's versions do not all read alike has no meaning.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

Array = NDArray[Any]
PREFIX = "base_model.model."
NAMES = {"embed_tokens": f"{PREFIX}model.embed_tokens", "lm_head": f"{PREFIX}lm_head"}


class NoMeaningError(Exception):
    """The files say nothing, or two things at once."""


class Tables(NamedTuple):
    """Embedding and head, float64 [vocabulary, width]."""

    embed_tokens: Array
    lm_head: Array


def tables_of(directory: Path, base: Tables, *, is_tied: bool) -> Tables:
    """The tables that a model has with this adapter. Raises NoMeaningError."""
    config = json.loads((directory / "adapter_config.json").read_text())
    held = {key: t.double().numpy() for key, t in load_file(directory / "adapter_model.safetensors").items()}
    has_lora = any(key.startswith(f"{name}.lora_") for key in held for name in NAMES.values())
    if is_tied and has_lora and config.get("ensure_weight_tying"):
        raise NoMeaningError("one pair for two tables")
    if is_tied and _head_repeats(config, held):
        del held[_tokens_key("lm_head")]
    for key in config.get("modules_to_save") or ():
        if not any(name.endswith(key) for name in NAMES.values()):
            raise NoMeaningError(f"{key} is another module")
    made = {name: _table(name, config, held, table) for name, table in base._asdict().items()}
    if not is_tied and _tokens(config, "lm_head") and _tokens_key("lm_head") not in held:
        raise NoMeaningError("tokens of the head were trained, and are not there")
    if is_tied:
        _check_tied(config, held, base)
        tokens = held.get(_tokens_key("embed_tokens"))
        if tokens is not None:
            made["lm_head"] = made["embed_tokens"].copy()
    return Tables(**made)


def _head_repeats(config: dict[str, Any], held: dict[str, Array]) -> bool:
    """Whether one pair of tables was saved by both its names."""
    embedding, head = (held.get(_tokens_key(name)) for name in NAMES)
    is_alike = embedding is not None and head is not None and np.array_equal(embedding, head)
    return is_alike and _tokens(config, "lm_head") in (None, _tokens(config, "embed_tokens"))


def _tokens_key(name: str) -> str:
    return f"{NAMES[name]}.token_adapter.trainable_tokens_delta"


def _tokens(config: dict[str, Any], name: str) -> list[int] | None:
    said = config.get("trainable_token_indices")
    if isinstance(said, dict):
        return next((tokens for key, tokens in said.items() if NAMES[name].endswith(key)), None)
    return said if name == "embed_tokens" else None


def _table(name: str, config: dict[str, Any], held: dict[str, Array], base: Array) -> Array:
    tokens, rows = _tokens(config, name), held.get(_tokens_key(name))
    whole, lora = held.get(f"{NAMES[name]}.weight"), _lora(name, config, held)
    is_saved = any(NAMES[name].endswith(key) for key in config.get("modules_to_save") or ())
    if is_saved and whole is None:
        raise NoMeaningError(f"{name} was saved whole, and is not there")
    if sum(found is not None for found in (rows, whole, lora)) > 1:
        raise NoMeaningError(f"{name} is replaced twice")
    if lora is not None:
        return base + lora
    if whole is not None:
        return _of_shape(whole, base.shape)
    if rows is None:
        if tokens and not (name == "lm_head" and tokens == _tokens(config, "embed_tokens")):
            raise NoMeaningError(f"tokens of {name} were trained, and are not there")
        return base
    if tokens is None or len(set(tokens)) != len(tokens) or not all(0 <= token < len(base) for token in tokens):
        raise NoMeaningError(f"which tokens of {name} were trained is not said")
    table = base.copy()
    table[tokens] = _of_shape(rows, (len(tokens), base.shape[1]))
    return table


def _of_shape(found: Array, wanted: tuple[int, ...]) -> Array:
    if found.shape != wanted:
        raise NoMeaningError(f"{found.shape} where {wanted} belongs")
    return found


def _lora(name: str, config: dict[str, Any], held: dict[str, Array]) -> Array | None:
    halves = ("lora_embedding_A", "lora_embedding_B") if name == "embed_tokens" else ("lora_A.weight", "lora_B.weight")
    if f"{NAMES[name]}.{halves[0]}" not in held:
        return None
    a, b = (held[f"{NAMES[name]}.{half}"] for half in halves)
    delta: Array = config["lora_alpha"] / config["r"] * (b @ a)
    return delta.T if name == "embed_tokens" else delta


def _check_tied(config: dict[str, Any], held: dict[str, Array], base: Tables) -> None:
    wholes = {name: held.get(f"{NAMES[name]}.weight") for name in NAMES}
    present = {name: table for name, table in wholes.items() if table is not None}
    saved = {name for name in NAMES if any(NAMES[name].endswith(key) for key in config.get("modules_to_save") or ())}
    moved = {name for name, table in present.items() if not np.array_equal(table, getattr(base, name))}
    if present and (moved - saved or config.get("ensure_weight_tying")):
        one, other = wholes.values()
        if one is None or other is None or not np.array_equal(one, other):
            raise NoMeaningError("one table of two that are one")
    if _tokens_key("embed_tokens") in held:
        own = (_tokens_key("lm_head"), f"{NAMES['lm_head']}.weight", f"{NAMES['lm_head']}.lora_A.weight")
        if any(key in held for key in own):
            raise NoMeaningError("a head that follows the embedding, and has something of its own")
