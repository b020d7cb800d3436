"""LoRA of experts on a device, for the rows of all adapters at once: (adapter, expert) is one virtual expert.

    gate_up   out[t, j]    (+)= delta of x[t] through (slot of t, topk_ids[t, j])
    down      out[t]       (+)= Σ_j topk_weights[t, j] · delta of act[t, j] through (slot of t, topk_ids[t, j])

One shrink and one expand launch a site. `down` of a tiny batch sums a row's pairs where it expands them; of others it
writes the weighted delta of every pair, and sums a row's in their order (`pair_sums`). `dense` is here too: the same
kernels, whose tiles are segments of rows.
"""

from typing import Literal

import torch
from torch import Tensor

from infinilora.kernels.expand import cuts_of, expand
from infinilora.kernels.indexed import MAX_PAIRS, MAX_ROWS, Pairs, indexed
from infinilora.kernels.pair_sums import PairSum, sum_pairs
from infinilora.kernels.shrink import shrink
from infinilora.kernels.site_table import SiteTable
from infinilora.kernels.tiles import PairTiles, StepRows

Path = Literal["auto", "grouped", "indexed"]
"""How rows find their weights: sorted into tiles, or each by itself; auto: the latter where they are few."""


def dense(table: SiteTable, rows: StepRows, x: Tensor, out: Tensor, *, accumulate: bool, path: Path = "auto") -> None:
    """out[t] (+)= scale · (x[t] · Aᵀ) · Bt of the slot of t; x [T, in], out [T, out_dim] fp32 or x's dtype.

    Rows in no segment and columns of no bound part get nothing: zeros unless `accumulate`.
    """
    has_work = _has_work(table, rows, x, out)
    if not accumulate and not (rows.is_gapless and table.covers(rows.slots)):
        out.zero_()
    if not has_work:
        return
    if _is_indexed(path, rows.num_rows, MAX_ROWS):
        if not accumulate and rows.is_gapless and table.covers(rows.slots):
            out.zero_()
        indexed(table, Pairs(rows, None), _dense_rows(x), out, x_top_k=1, summed=1, pair_weights=None)
        return
    v = shrink(
        table, _dense_rows(x), rows.tiles, order=None, top_k=1, num_rows=rows.num_rows, block_rows=rows.block_rows
    )
    expand(table, v, out, rows.tiles, order=None, pair_weights=None, accumulate=accumulate, block_rows=rows.block_rows)


def moe_gate_up(
    table: SiteTable,
    rows: StepRows,
    x: Tensor,
    topk_ids: Tensor,
    out: Tensor,
    *,
    accumulate: bool,
    path: Path = "auto",
) -> None:
    """The delta of gate and up. x [T, h]; topk_ids int32 [T, k]; out [T, k, 2f], contiguous.

    An id outside 0..E-1 adds nothing.
    """
    has_work = _has_work(table, rows, x, out) and _fits(topk_ids, rows, out)
    if not accumulate:
        out.zero_()
    if not has_work:
        return
    top_k, flat = topk_ids.shape[1], out.view(-1, out.shape[-1])
    if _is_indexed(path, len(flat), MAX_PAIRS):
        chosen = Pairs(rows, topk_ids.contiguous())
        indexed(table, chosen, _dense_rows(x), flat, x_top_k=top_k, summed=1, pair_weights=None)
        return
    pairs = PairTiles.of(rows, topk_ids, table.num_experts)
    v = shrink(
        table,
        _dense_rows(x),
        pairs.tiles,
        order=pairs.order,
        top_k=top_k,
        num_rows=len(flat),
        block_rows=pairs.block_rows,
    )
    expand(
        table,
        v,
        flat,
        pairs.tiles,
        order=pairs.order,
        pair_weights=None,
        accumulate=accumulate,
        block_rows=pairs.block_rows,
    )


def moe_down(
    table: SiteTable,
    rows: StepRows,
    act: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    out: Tensor,
    *,
    accumulate: bool,
    path: Path = "auto",
) -> None:
    """The delta of down, weighted and summed over k. act [T, k, f]; topk_ids int32 and topk_weights [T, k].

    out [T, h], contiguous in its rows. An id outside 0..E-1 adds nothing.
    """
    if not (_has_work(table, rows, act, out) and _fits(topk_ids, rows, act) and _fits(topk_weights, rows, act)):
        if not accumulate:
            out.zero_()
        return
    num_pairs = topk_ids.numel()
    flat = _dense_rows(act.reshape(num_pairs, act.shape[-1]))
    pair_weights = topk_weights.to(torch.float32).contiguous()
    if _is_indexed(path, num_pairs, MAX_PAIRS):
        if not accumulate:
            out.zero_()
        chosen = Pairs(rows, topk_ids.contiguous())
        indexed(table, chosen, flat, out, x_top_k=1, summed=topk_ids.shape[1], pair_weights=pair_weights)
        return
    pairs = PairTiles.of(rows, topk_ids, table.num_experts)
    weighted = torch.empty(num_pairs, table.out_dim, dtype=torch.float32, device=out.device)
    is_summed_inside = all(cut.sums == "inside" for cut in cuts_of(table, num_pairs, pairs.block_rows))
    if is_summed_inside and not accumulate:
        out.zero_()
    v = shrink(table, flat, pairs.tiles, order=pairs.order, top_k=1, num_rows=num_pairs, block_rows=pairs.block_rows)
    expand(
        table,
        v,
        weighted,
        pairs.tiles,
        order=pairs.order,
        pair_weights=pair_weights,
        accumulate=False,
        block_rows=pairs.block_rows,
        pair_sum=PairSum(out, topk_ids.contiguous(), table.num_experts) if is_summed_inside else None,
    )
    if not is_summed_inside:
        sum_pairs(table, rows, weighted, topk_ids, out, accumulate=accumulate)


def _is_indexed(path: Path, count: int, most: int) -> bool:
    return path == "indexed" or (path == "auto" and count <= most)


def _dense_rows(x: Tensor) -> Tensor:
    """Return x itself if its rows are contiguous, as the kernels want them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _has_work(table: SiteTable, rows: StepRows, x: Tensor, out: Tensor) -> bool:
    """Whether anything can be added at all. What does not fit the table would be read out of bounds: refused."""
    if x.shape[-1] != table.in_dim or out.shape[-1] != table.out_dim:
        raise ValueError(f"found {x.shape[-1]} -> {out.shape[-1]} columns; wanted {table.in_dim} -> {table.out_dim}")
    if len(x) != rows.num_rows or len(out) != rows.num_rows:
        raise ValueError(f"found {len(x)} and {len(out)} rows; the step has {rows.num_rows}")
    if rows.slots and max(rows.slots) >= table.num_slots:
        raise ValueError(f"slot {max(rows.slots)} is not one of {table.num_slots}")
    return len(rows.tiles) > 0 and table.summary.max_rank > 0


def _fits(choices: Tensor, rows: StepRows, pairs: Tensor) -> bool:
    """True; raise ValueError unless `choices` is [T, k] for pairs [T, k, columns]."""
    if choices.shape != pairs.shape[:2] or pairs.dim() != 3:
        raise ValueError(f"found choices {list(choices.shape)} for {list(pairs.shape)}; wanted [{rows.num_rows}, k]")
    return True
