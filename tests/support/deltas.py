"""Read a packed adapter back as weight deltas, the slow and obvious way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from infinilora.protocol.adapter import BaseCard
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.ingest import ingest
from infinilora.weights.packed import packed_ranges, part_arrays, read_header, verify
from infinilora.weights.peft import TENSORS_FILE
from infinilora.weights.synth import write_tensors
from infinilora.weights.tensorfile import open_tensors

Deltas = dict[str, NDArray[Any]]
"""Module name -> scale · B·A, float64 [out, in]."""


def packed_deltas(path: Path, card: BaseCard) -> Deltas:
    """The delta of every projection of the base that the packed file moves."""
    geometry, deltas = card.geometry(), Deltas()
    with path.open("rb") as file:
        header = read_header(file)
        for layer in range(card.num_layers + 1):
            for entry, offset, num_bytes in packed_ranges(header, layer):
                modules = {part.name: part.module for part in geometry[entry.layer, entry.site].parts}
                file.seek(offset)
                for block in range(entry.num_blocks):
                    raw = file.read(num_bytes // entry.num_blocks)
                    verify(entry, block, raw)
                    arrays = part_arrays(entry, header.manifest.dtype, np.frombuffer(raw, np.uint8))
                    for part, (a, bt) in zip(entry.parts, arrays, strict=True):
                        module = modules[part.name].replace("{expert}", str(block))
                        deltas[module] = part.scale * (bt.astype(np.float64).T @ a.astype(np.float64))
    return deltas


def ingested_deltas(source: Path, card: BaseCard, out: Path) -> Deltas:
    ingest(source, card, out)
    return packed_deltas(out, card)


def largest_difference(found: Deltas, wanted: Deltas) -> float:
    """Over all modules, relative to the largest wanted value; a module that is absent counts as zeros."""
    largest = max(float(np.abs(delta).max()) for delta in wanted.values())
    worst = 0.0
    for module in found.keys() | wanted.keys():
        difference = found.get(module, 0.0) - wanted.get(module, 0.0)
        worst = max(worst, float(np.abs(difference).max()))
    return worst / largest


def rename_tensors(directory: Path, names: dict[str, str], keep: Callable[[str], bool] = lambda _name: True) -> None:
    """Rewrite an adapter's tensor file with parts of its names replaced, dropping what is not kept."""
    file = open_tensors(directory / TENSORS_FILE)
    tensors = {}
    for name in file.tensors:
        new = name
        for old, other in names.items():
            new = new.replace(old, other)
        if keep(new):
            tensors[new] = np.array(file.read(name))
    write_tensors(directory / TENSORS_FILE, tensors)


def write_source(directory: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]], file: str = "") -> Path:
    """A directory with these two files, as they are given."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    write_tensors(directory / (file or TENSORS_FILE), tensors)
    return directory
