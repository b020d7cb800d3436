"""DoRA: each row of W + scale · B·A has the length m instead of its own, which only an engine of the base can tell.

    W' = c · (W + scale · B·A),  c = m / |W + scale · B·A|     row by row; the base's own bias b is left as it is
    y' = c · y + c · scale · B·(A·x) + (1 - c) · b             with y = W·x + b, as the base computes it

So a part has the column scale c, its Bt has c in it, and it has the bias (1 - c) · b where the base has one.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from infinilora.protocol.adapter import BaseCard, PartGeometry, Site
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.facts import Facts, Norms
from infinilora.weights.keys import Halves
from infinilora.weights.plan import ALL, Cut, Dora
from infinilora.weights.refuse import invalid
from infinilora.weights.tensorfile import Array, TensorFile


class Magnitude(NamedTuple):
    """The magnitudes of a part: some rows of a vector of the file, and the pair that they are for."""

    tensor: str
    a: Cut
    bt: Cut
    scale: float
    rows: slice = ALL


PartKey = tuple[int, Site, int]


def check_magnitude(file: str, module: str, halves: Halves, *, uses_dora: bool) -> None:
    """Raise AdapterInvalid unless a module has a magnitude where, and only where, its configuration says DoRA."""
    key, said = halves.magnitude, "fine_tune_type 'dora'" if halves.turned else "use_dora"
    if key is not None and halves.is_table:
        raise invalid(
            file,
            f"tensor {key}",
            found=f"DoRA on an embedding, {module}, which is not served",
            wanted="DoRA on projections only",
        )
    if key is not None and not uses_dora:
        raise invalid(
            file,
            f"tensor {key}",
            found="a magnitude of DoRA",
            wanted=f"none without {said} in {CONFIG_FILE} (it would silently be dropped)",
        )
    if key is None and uses_dora:
        raise invalid(file, f"module {module}", found="no magnitude of DoRA", wanted=f"one: {CONFIG_FILE} sets {said}")


def dora_parts(
    file: TensorFile, card: BaseCard, magnitudes: Mapping[PartKey, Magnitude], facts: Facts
) -> dict[PartKey, Dora]:
    """What DoRA makes of each part. Asks `facts`, and leaves out what they do not answer yet. Raises AdapterInvalid."""
    return dict(_parts(file, card, magnitudes, facts))


def _parts(
    file: TensorFile, card: BaseCard, magnitudes: Mapping[PartKey, Magnitude], facts: Facts
) -> Iterator[tuple[PartKey, Dora]]:
    geometry = card.geometry()
    for (layer, site, number), magnitude in sorted(magnitudes.items()):
        part = geometry[layer, site].parts[number]
        a, bt = magnitude.a.read(file), magnitude.bt.read(file)
        norms = facts.norms(part.module, a, bt.T, float(np.float32(magnitude.scale)))  # as kernels apply it
        if norms is not None:
            yield (layer, site, number), _dora(file, magnitude, part, norms, bt)


def _dora(file: TensorFile, magnitude: Magnitude, part: PartGeometry, norms: Norms, bt: Array) -> Dora:
    m = file.read(magnitude.tensor)[magnitude.rows].astype(np.float64)
    if not norms.lengths.all():
        raise invalid(
            file.name,
            f"tensor {magnitude.tensor}",
            found=f"a magnitude for row {int(np.argmin(norms.lengths != 0))} of {part.module}, which is all zeros",
            wanted="rows with a direction (PEFT divides by their length)",
        )
    with np.errstate(over="ignore"):
        factors = (m / norms.lengths).astype(np.float32)
        largest = np.abs(bt.astype(np.float32)).max(axis=0, initial=1.0) * np.abs(factors)
    if not np.isfinite(largest).all():
        raise invalid(
            file.name,
            f"tensor {magnitude.tensor}",
            found=f"a magnitude {float(m[np.argmax(~np.isfinite(largest))]):.6g}, too far from the row's own length",
            wanted="numbers of single precision",
        )
    return Dora(factors, None if norms.bias is None else _kept(norms.bias, factors))


def _kept(bias: Array, factors: Array) -> Array:
    """What gives the base's bias back after its output was scaled: (1 - c) · b, with c as it is applied."""
    kept: Array = ((1.0 - factors.astype(np.float64)) * bias.astype(np.float64)).astype(np.float32)
    return kept
