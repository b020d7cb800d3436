"""Does the packed file compute what the original files say? Two roads to every delta, compared.

The reference road goes from the original tensors to scale · B·(A·x) in float64, module by module, without
plan, cuts or padding. The packed road reads the written file back and verifies it, as a LoRA server does.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from infinilora.protocol.adapter import BaseCard, Site, SiteEntry
from infinilora.weights.fused import Fused, container_of, establish
from infinilora.weights.names import PREFIX, ModuleIndex, Place
from infinilora.weights.packed import packed_ranges, part_arrays, read_header, verify
from infinilora.weights.peft import PeftAdapter
from infinilora.weights.tensorfile import Array

Term = Callable[[Array, Array], None]
"""Adds one pair's share to delta [blocks, out], given x [in]; both float64."""


def self_test(adapter: PeftAdapter, card: BaseCard, packed: Path) -> float:
    """The largest error of any site's delta of a fixed input, relative to that delta's largest value.

    Raises AdapterFailed if a block of the packed file is not what its manifest says.
    """
    terms = _terms(adapter, ModuleIndex(card))
    geometry = card.geometry()
    worst = 0.0
    with packed.open("rb") as file:
        header = read_header(file)
        read: dict[tuple[int, Site], tuple[SiteEntry, int, int]] = {
            (layer, site_range[0].site): site_range
            for layer in range(card.num_layers + 1)
            for site_range in packed_ranges(header, layer)
        }
        for place in sorted(terms.keys() | read.keys()):
            site = geometry[place]
            x = _fixed_input(site.in_dim)
            wanted = np.zeros((site.num_experts or 1, site.out_dim))
            for add_to in terms.get(place, ()):
                add_to(wanted, x)
            found = np.zeros_like(wanted)
            if place in read:
                entry, offset, num_bytes = read[place]
                file.seek(offset)
                _packed_delta(entry, header.manifest.dtype, file.read(num_bytes), x, found)
            largest = float(np.abs(wanted).max())
            error = float(np.abs(found - wanted).max())
            worst = max(worst, error / largest if largest else error)
    return worst


def _fixed_input(in_dim: int) -> Array:
    return np.random.default_rng(in_dim).standard_normal(in_dim)


def _packed_delta(entry: SiteEntry, dtype: str, data: bytes, x: Array, delta: Array) -> None:
    block_bytes = entry.num_bytes // entry.num_blocks
    for block in range(entry.num_blocks):
        raw = data[block * block_bytes : (block + 1) * block_bytes]
        verify(entry, block, raw)
        arrays = part_arrays(entry, dtype, np.frombuffer(raw, np.uint8))
        for part, (a, bt) in zip(entry.parts, arrays, strict=True):
            columns = slice(part.out_offset, part.out_offset + part.out_dim)
            delta[block, columns] += part.scale * ((_wide(a) @ x) @ _wide(bt))


def _wide(array: Array) -> Array:
    return array.astype(np.float64)


# The reference road -------------------------------------------------------------------------------


def _terms(adapter: PeftAdapter, index: ModuleIndex) -> dict[tuple[int, Site], list[Term]]:
    terms: dict[tuple[int, Site], list[Term]] = defaultdict(list)
    for place, term in _every_term(adapter, index):
        terms[place].append(term)
    return terms


def _every_term(adapter: PeftAdapter, index: ModuleIndex) -> Iterator[tuple[tuple[int, Site], Term]]:
    half = ".lora_A.weight"
    for a in adapter.tensors.tensors:
        if not a.endswith(half):
            continue
        b = a.removesuffix(half) + ".lora_B.weight"
        module = a.removesuffix(half).removeprefix(PREFIX)
        if place := index.find(module):
            key = (place.geometry.layer, place.geometry.site)
            yield key, partial(_add_single, adapter, a, b, module, place)
        elif container := container_of(module, index):
            fused = establish(adapter.tensors, a, b, container=container, index=index, rules=adapter.rules)
            yield (fused.geometry.layer, fused.geometry.site), partial(_add_fused, fused)


def _add_single(adapter: PeftAdapter, a: str, b: str, module: str, place: Place, delta: Array, x: Array) -> None:
    """delta[expert, columns of the part] += scale · B·(A·x)."""
    part = place.geometry.parts[place.part]
    columns = slice(part.out_offset, part.out_offset + part.out_dim)
    scale = adapter.rules.scale(adapter.rules.target_key(module) or module)
    hidden = _wide(adapter.tensors.read(a)) @ x
    delta[place.expert or 0, columns] += scale * (_wide(adapter.tensors.read(b)) @ hidden)


def _add_fused(fused: Fused, delta: Array, x: Array) -> None:
    """delta[e] += scale · B_e·(A_e·x); of a crossed file scale · A_eᵀ·(B_eᵀ·x)."""
    a, b = _wide(fused.file.read(fused.a)), _wide(fused.file.read(fused.b))
    a = a.reshape(fused.geometry.num_experts, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, fused.geometry.num_experts)
    if fused.crossed:
        delta += fused.scale * np.einsum("eri,er->ei", a, np.einsum("ore,o->er", b, x))
    else:
        delta += fused.scale * np.einsum("ore,er->eo", b, np.einsum("eri,i->er", a, x))
