"""What an engine's shard keeps of a dense site: the columns that it computes with, closed up as a smaller site.

    as packed     | A_q | A_k | A_v | Bt_q [r, out_q]        | Bt_k | Bt_v | bias_q | ...      read, verified, cached
    of outputs    | A_q | A_k | A_v | Bt_q [r, columns of q] | ...         | its entries |     in the pool
    of inputs     | A_o [r, columns] | Bt_o | bias_o: of the shard that has the first input |

A sha256 is of a whole block, so what is kept is copied out of one that was verified. It is bound and called as any
site is, with the widths of the shard's own products.
"""

from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from infinilora.pool.bind import site_weights
from infinilora.pool.slices import WHOLE, SiteSlice
from infinilora.protocol.adapter import VECTOR_BYTES, PartEntry, SiteEntry, block_spans
from infinilora.protocol.errors import AdapterFailed


def trimmed(entry: SiteEntry, dtype: str, cut: SiteSlice) -> SiteEntry | None:
    """The site as it is kept, of no file; None where nothing of it is. Raises AdapterFailed where it is too narrow."""
    if cut == WHOLE:
        return entry
    in_begin, in_end = cut.inputs or (0, entry.in_dim)
    outputs = cut.outputs or ((0, entry.out_dim),)
    if in_end > entry.in_dim or outputs[-1][1] > entry.out_dim:
        raise AdapterFailed(
            f"layer {entry.layer} site {entry.site.label}: found an adapter of {entry.in_dim} -> {entry.out_dim} "
            f"columns; this shard has inputs {in_begin}..{in_end} and outputs up to {outputs[-1][1]}"
        )
    kept = (_kept(part, outputs, has_first=in_begin == 0) for part in entry.parts)
    if not (parts := tuple(part for part in kept if part)):
        return None
    _, num_bytes = block_spans(parts, in_end - in_begin, dtype)
    return msgspec.structs.replace(
        entry,
        in_dim=in_end - in_begin,
        out_dim=sum(end - begin for begin, end in outputs),
        parts=parts,
        num_bytes=num_bytes,
        sha256=(),
    )


def trim(entry: SiteEntry, kept: SiteEntry, dtype: str, cut: SiteSlice, block: Tensor, into: Tensor) -> None:
    """Copy what is kept: block uint8 [entry.num_bytes] -> into uint8 [kept.num_bytes], both aligned to 64 bytes."""
    inputs = slice(*cut.inputs) if cut.inputs else slice(None)
    whole = dict(zip((part.name for part in entry.parts), _factors(entry, dtype, block), strict=True))
    outs = {part.name: _runs(part, cut.outputs or ((0, entry.out_dim),)) for part in entry.parts}
    for part, own in zip(kept.parts, _factors(kept, dtype, into), strict=True):
        of = whole[part.name]
        own.a.copy_(of.a[:, inputs])
        for to, columns in ((own.bt, of.bt), (own.bias, of.bias), (own.colscale, of.colscale)):
            if to is not None and columns is not None:
                to.copy_(torch.cat([columns[..., begin:end] for begin, end in outs[part.name]], -1))


class _Factors(NamedTuple):
    """Views of one part: a [r, in], bt [r, out], vectors fp32 [out]."""

    a: Tensor
    bt: Tensor
    bias: Tensor | None
    colscale: Tensor | None


def _factors(entry: SiteEntry, dtype: str, block: Tensor) -> list[_Factors]:
    spans, _ = block_spans(entry.parts, entry.in_dim, dtype)
    scales = [
        block[span.colscale : span.colscale + part.out_dim * VECTOR_BYTES].view(torch.float32)
        if part.has_colscale
        else None
        for part, span in zip(entry.parts, spans, strict=True)
    ]
    weights = site_weights(entry, dtype, block)
    return [_Factors(part.a, part.bt, part.bias, scale) for part, scale in zip(weights, scales, strict=True)]


def _runs(part: PartEntry, outputs: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """The part's own columns that are kept."""
    first, end = part.out_offset, part.out_offset + part.out_dim
    return [(max(b, first) - first, min(e, end) - first) for b, e in outputs if b < end and e > first]


def _kept(part: PartEntry, outputs: tuple[tuple[int, int], ...], *, has_first: bool) -> PartEntry | None:
    """The part among the columns that are kept, side by side; None where it has none of them."""
    runs = _runs(part, outputs)
    if not runs:
        return None
    begin = part.out_offset + runs[0][0]
    return msgspec.structs.replace(
        part,
        out_dim=sum(end - begin for begin, end in runs),
        out_offset=sum(max(min(e, begin) - b, 0) for b, e in outputs),
        has_bias=part.has_bias and has_first,
    )
