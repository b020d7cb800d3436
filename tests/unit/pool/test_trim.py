"""What an engine's shard keeps of a packed site, held against the same columns of the whole site's factors."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from infinilora.pool.bind import site_weights
from infinilora.pool.slices import WHOLE, SiteSlice
from infinilora.pool.trim import trim, trimmed
from infinilora.protocol.adapter import DTYPE_BYTES, PartEntry, Site, SiteEntry, block_spans
from infinilora.protocol.errors import AdapterFailed

IN, OUTS, RANKS = 20, (12, 6, 6), (3, 0, 5)


def entry_of(dtype: str, *, has_vectors: bool, names: str = "qkv") -> SiteEntry:
    parts = tuple(
        PartEntry(name, rank, 0.5, out, sum(OUTS[:at]), has_bias=has_vectors, has_colscale=has_vectors)
        for at, (name, rank, out) in enumerate(zip("qkv", RANKS, OUTS, strict=True))
        if name in names
    )
    num_bytes = block_spans(parts, IN, dtype)[1]
    return SiteEntry(0, Site.QKV, IN, sum(OUTS), 0, parts, 640, num_bytes, ("of the block",))


def block_of(entry: SiteEntry, dtype: str) -> Tensor:
    """Every number of it is another."""
    block = torch.zeros(entry.num_bytes, dtype=torch.uint8)
    for number, part in enumerate(site_weights(entry, dtype, block)):
        for tensor in (part.a, part.bt, part.bias):
            if tensor is not None and tensor.numel():
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 17 * number)
    for number, values in enumerate(colscales(entry, dtype, block)):
        values.copy_(torch.arange(len(values)) + 100.0 * number)
    return block


def colscales(entry: SiteEntry, dtype: str, block: Tensor) -> list[Tensor]:
    spans, _ = block_spans(entry.parts, entry.in_dim, dtype)
    return [
        block[span.colscale : span.colscale + 4 * part.out_dim].view(torch.float32)
        for part, span in zip(entry.parts, spans, strict=True)
        if part.has_colscale
    ]


def whole_vectors(entry: SiteEntry, dtype: str, block: Tensor) -> tuple[Tensor, Tensor]:
    """Bias and column scale of all columns of the site; NaN where no part has one."""
    bias, scale = torch.full((2, entry.out_dim), torch.nan)
    parts = zip(entry.parts, site_weights(entry, dtype, block), strict=True)
    for part, weights in parts:
        if weights.bias is not None:
            bias[part.out_offset : part.out_offset + part.out_dim] = weights.bias
    for part, values in zip(entry.parts, colscales(entry, dtype, block), strict=False):
        scale[part.out_offset : part.out_offset + part.out_dim] = values
    return bias, scale


def delta(entry: SiteEntry, dtype: str, block: Tensor) -> Tensor:
    """[in, out]: what a one in each input becomes, without vectors. Columns that no part writes are zeros."""
    out = torch.zeros(entry.in_dim, entry.out_dim, dtype=torch.float64)
    for part in site_weights(entry, dtype, block):
        columns = slice(part.out_offset, part.out_offset + part.out_dim)
        out[:, columns] += part.scale * part.a.double().T @ part.bt.double()
    return out


CUTS = {
    "outputs": SiteSlice(outputs=((2, 7), (13, 14), (18, 24))),
    "two runs of a part": SiteSlice(outputs=((0, 3), (5, 9), (20, 22))),
    "one part": SiteSlice(outputs=((12, 18),)),
    "the first inputs": SiteSlice(inputs=(0, 7)),
    "other inputs": SiteSlice(inputs=(7, 20)),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("has_vectors", [False, True], ids=["factors", "vectors"])
@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_what_is_kept_is_those_columns_of_the_whole(dtype: str, cut: SiteSlice, *, has_vectors: bool) -> None:
    entry = entry_of(dtype, has_vectors=has_vectors)
    block = block_of(entry, dtype)
    kept = trimmed(entry, dtype, cut)
    assert kept is not None
    into = torch.full((kept.num_bytes,), 0x7B, dtype=torch.uint8)
    trim(entry, kept, dtype, cut, block, into)
    inputs = slice(*cut.inputs) if cut.inputs else slice(None)
    columns = torch.cat([torch.arange(*run) for run in cut.outputs or ((0, sum(OUTS)),)])
    assert torch.equal(delta(kept, dtype, into), delta(entry, dtype, block)[inputs][:, columns])
    bias, scale = (vector[columns] for vector in whole_vectors(entry, dtype, block))
    if inputs.start:
        bias = torch.full_like(bias, torch.nan)
    for found, wanted in zip(whole_vectors(kept, dtype, into), (bias, scale), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_bias_is_kept_with_the_first_inputs_alone_and_a_scale_with_all() -> None:
    entry = entry_of("F32", has_vectors=True)
    for inputs, has_bias in (((0, 7), True), ((7, 20), False)):
        kept = trimmed(entry, "F32", SiteSlice(inputs=inputs))
        assert kept is not None
        assert [(part.has_bias, part.has_colscale) for part in kept.parts] == [(has_bias, True)] * 3


@pytest.mark.parametrize("edges", [(0, 20), (0, 5, 20), (0, 1, 2, 19, 20)], ids=str)
def test_the_bytes_of_all_shards_are_those_of_the_site_and_of_what_each_needs_whole(edges: tuple[int, ...]) -> None:
    entry = entry_of("F32", has_vectors=False)
    for begin, end in pairwise(edges):
        kept = trimmed(entry, "F32", SiteSlice(inputs=(begin, end)))
        assert kept is not None
        numbers = sum(RANKS) * (end - begin) + sum(rank * out for rank, out in zip(RANKS, OUTS, strict=True))
        assert 0 <= kept.num_bytes - 4 * numbers < 64


def test_a_site_of_which_no_column_is_kept_is_nothing() -> None:
    assert trimmed(entry_of("F32", has_vectors=False, names="k"), "F32", SiteSlice(outputs=((0, 12),))) is None


def test_what_is_whole_stays_as_it_is() -> None:
    entry = entry_of("BF16", has_vectors=True)
    assert trimmed(entry, "BF16", WHOLE) is entry


@pytest.mark.parametrize("cut", [SiteSlice(inputs=(0, 21)), SiteSlice(outputs=((0, 3), (20, 25)))], ids=str)
def test_an_adapter_that_is_narrower_than_the_shard_is_refused(cut: SiteSlice) -> None:
    with pytest.raises(AdapterFailed, match="found an adapter of 20 -> 24 columns"):
        trimmed(entry_of("F32", has_vectors=False), "F32", cut)
