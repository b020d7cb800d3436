"""Copies of tables, which PEFT saves beside what it trained of an embedding or a head: compared, then left out.

    ...MODULE.base_layer.weight                  the base's own, beside LoRA
    ...MODULE.token_adapter.base_layer.weight    the base's own, beside trained tokens
    ...MODULE.original_module.weight             the base's own, beside a table of modules_to_save
    ...MODULE.modules_to_save[.ADAPTER].weight   the trained table a second time, beside ...MODULE.weight

The last three come with `save_embedding_layers=True`, which PEFT takes for granted where the vocabulary grew. A copy
that is the base's is no part of the adapter. One that is not was trained, or grown, or is of another base: without it
the adapter would be half served. The base card has a hash of each table, so no weights are needed here.
"""

import hashlib
import re
from dataclasses import replace

import numpy as np

from infinilora.protocol.adapter import BaseCard, Table
from infinilora.protocol.errors import AdapterInvalid
from infinilora.weights.names import canonical
from infinilora.weights.pissa import Began
from infinilora.weights.refuse import invalid
from infinilora.weights.spelling import OneSpelling, plain_module
from infinilora.weights.tensorfile import NUMPY_DTYPES, Array, TensorFile

_COPY = re.compile(r"(?P<module>.+?)\.((token_adapter\.)?base_layer|original_module)\.weight\Z")
_AGAIN = re.compile(r"(?P<module>.+)\.modules_to_save(\.[^.]+)?\.weight\Z")
_CHUNK_VALUES = 1 << 20


def without_copies(file: TensorFile, card: BaseCard, spelling: OneSpelling) -> TensorFile:
    """The file without its copies of tables. Raises AdapterInvalid where one differs from what it should be."""
    kept = {}
    for key, info in file.tensors.items():
        if _is_said_again(file, card, key):
            continue
        found = _COPY.match(key)
        table = card.tables.get(canonical(spelling.module(key, found["module"]))) if found else None
        if table is None:
            kept[key] = info
        elif not is_table(file.read(key), table):
            raise _not_the_bases(file, key, card, table)
    return replace(file, tensors=kept)


def _is_said_again(file: TensorFile, card: BaseCard, key: str) -> bool:
    """Whether a tensor is a trained table by its second name. Raises AdapterInvalid where the two differ."""
    found = _AGAIN.match(key)
    first = f"{found['module']}.weight" if found else ""
    if not found or first not in file.tensors or canonical(plain_module(found["module"])[0]) not in card.tables:
        return False
    if not np.array_equal(file.read(first), file.read(key)):
        raise invalid(file.name, f"tensors {first} and {key}", found="two tables of one module", wanted="one, or equal")
    return True


def _not_the_bases(file: TensorFile, key: str, card: BaseCard, table: Table) -> AdapterInvalid:
    info = file.tensors[key]
    found = f"a table {list(info.shape)} of {info.dtype} that is not {card.name}'s own"
    if info.shape != table.shape:
        found += " (a vocabulary that was resized)"
        wanted = f"{list(table.shape)}: {card.name} has a vocabulary of {card.vocab_size}"
    elif isinstance(file, Began):
        # Less the first values, and rounded: whether it was the base's, only all of the base's rows could tell.
        wanted = (
            "none: training began with a part of this table, and left the rest of it here; the pair and its first "
            "values are enough (save again with save_embedding_layers=False)"
        )
    else:
        wanted = (
            f"the base's own {list(table.shape)} of {table.dtype}, or none: a table that was trained whole is served "
            "only without LoRA on it"
        )
    return invalid(file.name, f"tensor {key}", found=found, wanted=wanted)


def is_table(copy: Array, table: Table) -> bool:
    """Whether the values are the table's, in whatever dtype both are kept."""
    kind = NUMPY_DTYPES[table.dtype]
    if copy.shape != table.shape:
        return False
    state = hashlib.sha256()
    flat = copy.reshape(-1)
    for start in range(0, flat.size, _CHUNK_VALUES):
        values = flat[start : start + _CHUNK_VALUES]
        with np.errstate(over="ignore"):
            theirs = values.astype(kind)
        if not np.array_equal(theirs.astype(np.float32), values.astype(np.float32)):
            return False
        state.update(theirs.tobytes())
    return state.hexdigest() == table.sha256
