"""LoRA on fused experts: one A and one B for all experts of a parameter, as PEFT writes `target_parameters`.

    A [E·R, i]   rows e·R .. (e+1)·R      are expert e's A
    B [o, R·E]   columns e, E+e, 2E+e ... are expert e's B        (the rank is the slower index)

Which parameter a pair belongs to is told by its shape, never by its place in PEFT's nest of wrappers: the
gate-up of widths (h, 2f) and the down of widths (f, h) cannot be confused. PEFT until 0.19.0 took a
parameter [E, out, in] for [E, in, out], so that its A is as wide as the output and its B as the input:
`crossed`. Shapes tell that too, unless input and output are equally wide; then the version in the
configuration tells, and where it is absent the adapter is refused. (Established with the files and the
wrappers of PEFT 0.17.0 to 0.21.2; the order of experts and ranks is the same in all of them.)
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from infinilora.protocol.adapter import PartGeometry, Site, SiteGeometry
from infinilora.weights.names import ModuleIndex
from infinilora.weights.plan import Cut, Pair
from infinilora.weights.refuse import invalid
from infinilora.weights.rules import LoraRules
from infinilora.weights.tensorfile import TensorFile

PARAMETER = {Site.MOE_GATE_UP: "gate_up_proj", Site.MOE_DOWN: "down_proj"}
_WRAPPER = ".base_layer"


def container_of(module: str, index: ModuleIndex) -> str | None:
    """The experts' container that a wrapped module name means, or None where it means no fused experts."""
    name = module
    while name.endswith(_WRAPPER):
        name = name.removesuffix(_WRAPPER)
    return name if index.experts_of(name) else None


@dataclass(frozen=True, slots=True)
class Fused:
    """One fused pair, established: its site, its rank in the file, and whether A and B are crossed."""

    file: TensorFile
    a: str
    b: str
    geometry: SiteGeometry
    rank: int
    crossed: bool
    scale: float

    def parts(self) -> Iterator[tuple[int, tuple[Pair, ...]]]:
        """(part, pairs by expert) for every part of the parameter."""
        for number, part in enumerate(self.geometry.parts):
            low, high = self._used_ranks(part)
            yield number, tuple(self._pair(part, e, low, high) for e in range(self.geometry.num_experts))

    def _pair(self, part: PartGeometry, expert: int, low: int, high: int) -> Pair:
        num_experts, start = self.geometry.num_experts, expert * self.rank
        rows = slice(start + low, start + high)
        cols = slice(expert + low * num_experts, expert + high * num_experts, num_experts)
        out = _columns(part)
        if self.crossed:
            a, bt = Cut(self.b, cols=cols, turned=True), Cut(self.a, rows=rows, cols=out)
        else:
            a, bt = Cut(self.a, rows=rows), Cut(self.b, rows=out, cols=cols, turned=True)
        return Pair(a=a, bt=bt, rank=high - low)

    def _used_ranks(self, part: PartGeometry) -> tuple[int, int]:
        """The span of ranks whose output side is not all zeros for this part.

        Adapters that were fused from separate gate and up factors have twice the rank and zeros in one half.
        Of a part that is all zeros one rank is kept.
        """
        num_experts, out = self.geometry.num_experts, _columns(part)
        if self.crossed:
            factor = self.file.read(self.a)[:, out].reshape(num_experts, self.rank, -1)
            used = np.flatnonzero((factor != 0).any(axis=(0, 2)))
        else:
            factor = self.file.read(self.b)[out].reshape(-1, self.rank, num_experts)
            used = np.flatnonzero((factor != 0).any(axis=(0, 2)))
        return (int(used[0]), int(used[-1]) + 1) if used.size else (0, 1)


class OneGeneration:
    """Holds the flattened pairs of one file to one generation of PEFT: crossed all, or none.

    Between calls: the first tensor of each that was seen.
    """

    def __init__(self) -> None:
        self._first: dict[bool, str] = {}

    def check(self, fused: Fused) -> None:
        """Raise AdapterInvalid where another pair was read the other way: shapes and version contradict each other."""
        self._first.setdefault(fused.crossed, fused.a)
        if len(self._first) > 1:
            raise invalid(
                fused.file.name,
                f"tensors {self._first[True]} and {self._first[False]}",
                found="experts flattened as PEFT did until 0.19.0, and as it has done since (told by their shapes, "
                "and where input and output are equally wide by peft_version)",
                wanted="one of them in a file",
            )


def _columns(part: PartGeometry) -> slice:
    return slice(part.out_offset, part.out_offset + part.out_dim)


def establish(file: TensorFile, a: str, b: str, *, container: str, index: ModuleIndex, rules: LoraRules) -> Fused:
    """Tell site, rank and orientation of a fused pair from its shapes. Raises AdapterInvalid if they do not tell."""
    shape_a, shape_b = file.tensors[a].shape, file.tensors[b].shape
    if len(shape_a) != 2 or len(shape_b) != 2 or shape_a[0] != shape_b[1]:
        raise invalid(
            file.name,
            f"tensors {a} and {b}",
            found=f"shapes {list(shape_a)} and {list(shape_b)}",
            wanted="[experts x rank, in] and [out, rank x experts]",
        )
    geometry, crossed = _orientation(file.name, a, (shape_a[1], shape_b[0]), index.experts_of(container), rules)
    parameter = f"{container}.{PARAMETER[geometry.site]}"
    if not rules.targets_parameter(parameter):
        raise invalid(file.name, f"tensor {a}", found=f"LoRA on {parameter}", wanted="it in target_parameters")
    rank = rules.rank(parameter)
    if shape_a[0] != rank * geometry.num_experts:
        raise invalid(
            file.name,
            f"tensor {a} rows",
            found=shape_a[0],
            wanted=f"{geometry.num_experts} experts x rank {rank} (from adapter_config.json)",
        )
    return Fused(file, a, b, geometry, rank, crossed, rules.scale(parameter))


def _orientation(
    file: str, tensor: str, widths: tuple[int, int], sites: tuple[SiteGeometry, ...], rules: LoraRules
) -> tuple[SiteGeometry, bool]:
    straight = [s for s in sites if widths == (s.in_dim, s.out_dim)]
    crossed = [s for s in sites if widths == (s.out_dim, s.in_dim)]
    if straight and not crossed:
        return straight[0], False
    if crossed and not straight:
        return crossed[0], True
    if straight and crossed:
        return straight[0], _version_crosses(file, tensor, widths, rules)
    wanted = " or ".join(f"{PARAMETER[s.site]} (in {s.in_dim}, out {s.out_dim})" for s in sites)
    raise invalid(file, f"tensor {tensor} widths", found=f"in {widths[0]}, out {widths[1]}", wanted=wanted)


_FIRST_STRAIGHT = (0, 19, 1)


def _version_crosses(file: str, tensor: str, widths: tuple[int, int], rules: LoraRules) -> bool:
    found = re.match(r"\s*v?(\d+)\.(\d+)\.(\d+)", rules.config.peft_version or "")
    if not found:
        raise invalid(
            file,
            f"tensor {tensor}",
            found=f"equal widths {widths[0]} and {widths[1]}, and peft_version {rules.config.peft_version!r}",
            wanted="a peft_version in adapter_config.json, which tells how A and B are to be read",
        )
    return tuple(int(number) for number in found.groups()) < _FIRST_STRAIGHT
