"""The definition of every LoRA kernel, in plain torch: what the compiled ones are tested against.

Right on any device and dtype; one product for each (segment, part), so slow. All arithmetic is fp32.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from infinilora.kernels.batch import Part, SiteWeights

Bound = Mapping[int, SiteWeights]
"""slot -> the weights of the one site and layer that a call is about. A slot not in it adds nothing."""


def part_delta(x: Tensor, part: Part, expert: int | None = None) -> Tensor:
    """Compute scale * (x A^T) Bt: x [n, in] -> fp32 [n, out]; `expert` picks one of an expert part."""
    a, bt = (part.a, part.bt) if expert is None else (part.a[expert], part.bt[expert])
    return (x.float() @ a.float().T) @ bt.float() * part.scale


def dense(bound: Bound, segments: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out[t, part columns] (+)= scale[s] * (x[t] A[s]^T) Bt[s] (+ bias[s]), with s the slot of t's segment.

    segments int32 [n, 3]; x [T, in]; out [T, out_dim], may be strided in rows. Without `accumulate` all else
    of out is zeroed, whatever it held.
    """
    if not accumulate:
        out.zero_()
    for start, rows, slot in _segments(segments):
        for part in bound.get(slot, ()):
            delta = part_delta(x[start : start + rows], part)
            _add(out[start : start + rows], part, delta if part.bias is None else delta + part.bias)


def dense_columns(
    bound: Bound,
    segments: Tensor,
    x: Tensor,
    out: Tensor,
    *,
    first: int,
    first_in: int | None = None,
    accumulate: bool = False,
) -> None:
    """out[t, j] (+)= column `first + j` of what `dense` computes; out [T, some columns of the site].

    With `first_in`, x [T, n] are columns `first_in`.. of the site's input, and this is their part of the sum. Biases
    belong to the part of the first column.
    """
    end = first + out.shape[1]
    inputs = None if first_in is None else slice(first_in, first_in + x.shape[1])
    narrow = {
        slot: tuple(
            _narrowed(p, first, end, inputs) for p in parts if p.out_offset < end and p.out_offset + p.out_dim > first
        )
        for slot, parts in bound.items()
    }
    dense(narrow, segments, x, out, accumulate=accumulate)


def embed(bound: Bound, segments: Tensor, ids: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out[t] (+)= scale[s] * A[s][:, ids[t]]^T Bt[s]: `dense` of a one-hot x. ids int32 [T]; out [T, h]."""
    if not accumulate:
        out.zero_()
    for start, rows, slot in _segments(segments):
        for part in bound.get(slot, ()):
            columns = part.a.index_select(1, ids[start : start + rows])
            _add(out[start : start + rows], part, columns.float().T @ part.bt.float() * part.scale)


def add_biases(bound: Bound, segments: Tensor, out: Tensor) -> None:
    """out[t, part columns] += bias[s]: the end of `dense` for kernels that know no bias."""
    for start, rows, slot in _segments(segments):
        for part in bound.get(slot, ()):
            if part.bias is not None:
                _add(out[start : start + rows], part, part.bias)


def moe_gate_up(bound: Bound, segments: Tensor, x: Tensor, topk_ids: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out[t, j] (+)= delta of x[t] through expert topk_ids[t, j] of the slot of t.

    x [T, h]; topk_ids int32 [T, k]; out [T, k, 2f]. An id outside 0..E-1 adds nothing.
    """
    if not accumulate:
        out.zero_()
    for start, rows, slot in _segments(segments):
        for part in bound.get(slot, ()):
            for expert, t, j in _pairs(topk_ids[start : start + rows], part.num_experts):
                delta = part_delta(x[start + t], part, expert)
                out[start + t, j, _columns(part)] += delta.to(out.dtype)


def moe_down(
    bound: Bound,
    segments: Tensor,
    act: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    out: Tensor,
    *,
    accumulate: bool,
) -> None:
    """out[t] (+)= sum over j of topk_weights[t, j] * delta of act[t, j] through expert topk_ids[t, j].

    act [T, k, f]; topk_ids int32 and topk_weights fp32 [T, k]; out [T, h]. An id outside 0..E-1 adds nothing.
    """
    if not accumulate:
        out.zero_()
    for start, rows, slot in _segments(segments):
        for part in bound.get(slot, ()):
            delta = torch.zeros(rows, part.out_dim, device=out.device)
            for expert, t, j in _pairs(topk_ids[start : start + rows], part.num_experts):
                weight = topk_weights[start + t, j].float().unsqueeze(1)
                delta.index_add_(0, t, weight * part_delta(act[start + t, j], part, expert))
            _add(out[start : start + rows], part, delta)


def _segments(segments: Tensor) -> Iterator[tuple[int, int, int]]:
    for start, rows, slot in segments.tolist():
        if rows:
            yield start, rows, slot


def _narrowed(part: Part, first: int, end: int, inputs: slice | None) -> Part:
    """The part's columns that lie in the site's [first, end), which it meets; offsets count from `first`.

    Of its inputs some: the bias is then of those that begin at 0.
    """
    begin = max(first - part.out_offset, 0)
    columns = slice(begin, end - part.out_offset)
    a, bias = part.a, None if part.bias is None else part.bias[columns]
    if inputs is not None:
        a, bias = a[:, inputs], None if inputs.start else bias
    return Part(a, part.bt[:, columns], part.scale, part.out_offset + begin - first, bias)


def _columns(part: Part) -> slice:
    return slice(part.out_offset, part.out_offset + part.out_dim)


def _add(out: Tensor, part: Part, delta: Tensor) -> None:
    columns = out[:, _columns(part)]
    columns.copy_(columns.float() + delta)


def _pairs(topk_ids: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each expert that some token chose: (expert, token indices, which of the k)."""
    for expert in sorted(set(topk_ids.flatten().tolist())):
        if 0 <= expert < num_experts:
            t, j = torch.where(topk_ids == expert)
            yield expert, t, j
