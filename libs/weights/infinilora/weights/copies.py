"""Copies of the base's own tables, which PEFT saves beside LoRA on an embedding or a head: compared, then left out.

A copy that is the base's is no part of the adapter. One that is not was trained, or grown, or is of another base:
without it the adapter would be half served. The base card has a hash of each table, so no weights are needed here.
"""

import hashlib
import re
from dataclasses import replace

import numpy as np

from infinilora.protocol.adapter import BaseCard, Table
from infinilora.weights.names import canonical
from infinilora.weights.pissa import Began
from infinilora.weights.refuse import invalid
from infinilora.weights.spelling import OneSpelling
from infinilora.weights.tensorfile import NUMPY_DTYPES, Array, TensorFile

_COPY = re.compile(r"(?P<module>.+)\.base_layer\.weight\Z")
_CHUNK_VALUES = 1 << 20


def without_copies(file: TensorFile, card: BaseCard, spelling: OneSpelling) -> TensorFile:
    """The file without its copies of the base's tables. Raises AdapterInvalid where one differs from the base's."""
    kept = {}
    for key, info in file.tensors.items():
        found = _COPY.match(key)
        table = card.tables.get(canonical(spelling.module(key, found["module"]))) if found else None
        if table is None:
            kept[key] = info
        elif not is_table(file.read(key), table):
            found_table = f"a table {list(info.shape)} of {info.dtype} that is not {card.name}'s own"
            raise invalid(file.name, f"tensor {key}", found=found_table, wanted=_wanted(file, table))
    return replace(file, tensors=kept)


def _wanted(file: TensorFile, table: Table) -> str:
    if isinstance(file, Began):
        # Less the first values, and rounded: whether it was the base's, only all of the base's rows could tell.
        return (
            "none: training began with a part of this table, and left the rest of it here; the pair and its first "
            "values are enough (save again with save_embedding_layers=False)"
        )
    return (
        f"the base's own {list(table.shape)} of {table.dtype}, or none: a table that was trained whole is served only "
        "without LoRA on it"
    )


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
