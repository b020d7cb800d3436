"""Adapters that began with a part of the base's own weights: PiSSA, OLoRA, CorDA, LoRA-GA, their first values beside.

Training took s·B0·A0 out of the base, and went on from there. On the base as it is, the adapter is the difference:

    W' = (W - s·B0·A0) + s·B·A,   delta = s·(B·A - B0·A0) = s·[B, -B0]·[A; A0]

so a pair and its first values are read as one pair of twice the rank, with twice the alpha: what PEFT makes of them
when it converts. `pissa_init/` (INITIAL_DIRS) holds the first values, as PEFT saved them before the first step.
LoftQ is none of these: it also rounded the base, and the difference of the pairs is not all that changed.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from typing_extensions import override

from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.config import CONFIG_FILE, LoraConfig
from infinilora.weights.names import EMBED, HEAD
from infinilora.weights.refuse import invalid
from infinilora.weights.rules import LoraRules, checked_rules
from infinilora.weights.tensorfile import Array, TensorFile, TensorInfo, open_tensors
from infinilora.weights.unpack import INITIAL_DIRS

_KINDS = re.compile(r"(pissa(_niter_\d+)?|olora|corda|lora_ga)\Z", re.IGNORECASE)
_HALF = re.compile(r"\.lora_(embedding_)?(?P<half>[AB])(\.(?!bias\Z)[^.]+)*\Z")
_UNSERVED = re.compile(r"\.lora_(magnitude_vector|B(\.[^.]+)*\.bias)")
_INIT = "init_lora_weights"
_ALIKE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Settings that decide how much of the base the first values are."""


def began_in_base(config: dict[str, Any]) -> bool:
    """Whether a configuration says that training began with a part of the base, and no more was changed there."""
    kind = config.get(_INIT)
    return isinstance(kind, str) and _KINDS.match(kind) is not None


def begun_plainly(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as it is after conversion, but for its ranks; others stay as they are."""
    return config | {_INIT: True} if began_in_base(config) else config


def first_values(directory: Path) -> Path | None:
    """Where an adapter's first values lie. Raises AdapterInvalid where there are two such places."""
    found = [directory / name for name in INITIAL_DIRS if (directory / name).is_dir()]
    if len(found) > 1:
        names = " and ".join(f"{place.name}/" for place in found)
        raise invalid(CONFIG_FILE, _INIT, found=f"{names} beside it", wanted="one directory of first values")
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Began(TensorFile):
    """A weight file whose pairs are joined with their first values, tensor by tensor as they are read."""

    own: TensorFile = field(kw_only=True)
    first: TensorFile = field(kw_only=True)

    @override
    def read(self, tensor: str) -> Array:
        found = _HALF.search(tensor)
        if not found:
            return self.own.read(tensor)
        own, first = self.own.read(tensor), self.first.read(tensor)
        if own.dtype != first.dtype:
            own, first = own.astype(np.float32), first.astype(np.float32)
        return np.concatenate([own, first]) if found["half"] == "A" else np.concatenate([own, -first], axis=1)

    @override
    def sha256(self) -> str:
        return self.own.sha256()


def joined(own: TensorFile, first: TensorFile, rules: LoraRules, place: str) -> Began:
    """`own` with the first values of `place` taken away. Raises AdapterInvalid unless they are of the same pairs."""
    _refuse_beyond_pairs(own, rules.config)
    ranks = {rules.config.r, *rules.config.rank_pattern.values()}
    for key in sorted(own.tensors.keys() ^ first.tensors.keys()):
        if _HALF.search(key):
            there, missing = (own.name, f"{place}/{first.name}") if key in own.tensors else (place, own.name)
            raise invalid(missing, f"tensor {key}", found="none", wanted=f"one, as in {there}")
    tensors = {key: _both(own, first, key, ranks, place) for key in own.tensors}
    return Began(path=own.path, tensors=tensors, data=own.data, dtypes=own.dtypes, own=own, first=first)


def _both(own: TensorFile, first: TensorFile, key: str, ranks: set[int], place: str) -> TensorInfo:
    info, found = own.tensors[key], _HALF.search(key)
    if not found:
        return info
    other, axis = first.tensors[key], 0 if found["half"] == "A" else 1
    if other.shape != info.shape:
        name = f"{place}/{first.name}"
        raise invalid(name, f"tensor {key} shape", found=list(other.shape), wanted=list(info.shape))
    if len(info.shape) != 2 or info.shape[axis] not in ranks:
        raise invalid(
            own.name,
            f"tensor {key} shape",
            found=f"{list(info.shape)}, under an {_INIT} that changes the base",
            wanted=f"a pair of rank {' or '.join(map(str, sorted(ranks)))} of one projection",
        )
    shape = tuple(2 * size if at == axis else size for at, size in enumerate(info.shape))
    return TensorInfo(info.dtype if info.dtype == other.dtype else "F32", shape, info.data_offsets)


def _refuse_beyond_pairs(own: TensorFile, config: LoraConfig) -> None:
    """What PEFT does not convert either: it drops magnitudes, and would mix up experts and patterns."""
    with_patterns = config.use_rslora and (config.rank_pattern or config.alpha_pattern)
    unserved = {
        "use_rslora": with_patterns and "true, with rank_pattern or alpha_pattern",
        "target_parameters": config.target_parameters and f"{config.target_parameters!r:.200}",
        "lora_bias": config.lora_bias and "true",
        "use_dora": config.use_dora and "true",
    }
    for key, found in unserved.items():
        if found:
            raise invalid(CONFIG_FILE, key, found=f"{found}, under an {_INIT} that changes the base", wanted="it unset")
    for key in own.tensors:
        if _UNSERVED.search(key):
            raise invalid(
                own.name, f"tensor {key}", found=f"this beside an {_INIT} that changes the base", wanted="none"
            )


def doubled(rules: LoraRules, first: LoraRules, place: str) -> LoraRules:
    """The rules of the joined pairs: twice the rank at the same scale. Raises AdapterInvalid where the two differ."""
    config = rules.config
    for key in _ALIKE:
        wanted, found = getattr(config, key), getattr(first.config, key)
        if found != wanted:
            raise invalid(f"{place}/{CONFIG_FILE}", key, found=found, wanted=f"{wanted}, as in {CONFIG_FILE}")
    gain = math.sqrt(2) if config.use_rslora else 2.0
    return checked_rules(
        msgspec.structs.replace(
            config,
            r=2 * config.r,
            lora_alpha=gain * config.lora_alpha,
            rank_pattern={pattern: 2 * rank for pattern, rank in config.rank_pattern.items()},
            alpha_pattern={pattern: 2 * alpha for pattern, alpha in config.alpha_pattern.items()},
        ),
        others=rules.others,
    )


def check_head(file: TensorFile, card: BaseCard, modules: Collection[str]) -> None:
    """Raise AdapterInvalid where training took first values out of a head that is also the embedding.

    What it took out of the embedding is in no pair, and PEFT's own conversion leaves it out. `modules`: with pairs.
    """
    table = card.tables.get(HEAD)
    if isinstance(file, Began) and HEAD in modules and table is not None and table == card.tables.get(EMBED):
        raise invalid(
            file.name,
            f"a pair on {HEAD}",
            found=f"one that began with a part of it ({_INIT}), where {card.name} ties it to its embedding: training "
            "took that part out of both",
            wanted=f"{HEAD} left out of target_modules, or an adapter that began plainly",
        )


def refuse_unconverted(own: TensorFile, place: Path) -> None:
    """Raise AdapterInvalid where first values lie beside pairs of their own size, which say that they are plain.

    PEFT's own recipe sets `init_lora_weights` to true before it saves the first values, and leaves it at that. A
    converted adapter has pairs of twice the rank.
    """
    try:
        first = open_tensors(place / own.name).tensors
    except (FileNotFoundError, AdapterInvalid):
        return  # no first values of anything
    for key, info in own.tensors.items():
        if _HALF.search(key) and key in first and first[key].shape == info.shape:
            raise invalid(
                CONFIG_FILE,
                _INIT,
                found=f"that of plain LoRA, and {place.name}/ beside it with first values of the same shapes: "
                f"tensor {key}",
                wanted=f"'pissa', 'olora', 'corda' or 'lora_ga' if training took {place.name}/ out of the base, "
                f"or no {place.name}/ if it did not",
            )
