"""How the tensors of a site call lie, and what they must agree with: what engine_end.py checks and cuts by."""

import torch
from torch import Tensor

from infinilora.link.frame import DTYPE_CODES, Flag
from infinilora.link.ports import Ticket
from infinilora.protocol.errors import InvalidRequest


def flat_rows(x: Tensor) -> Tensor:
    """Return x [T, ...] as [T, cols] with adjacent columns; a view where it can be one."""
    flat = x if x.dim() == 2 else x.flatten(1)
    return flat if flat.stride(1) == 1 or flat.shape[1] <= 1 else flat.contiguous()


def route(ticket: Ticket, topk_ids: Tensor | None, topk_weights: Tensor | None) -> None:
    """Put the ticket's rows of the experts of a call, and of their weights, into it. Ids may come alone."""
    header, at = ticket.header, slice(ticket.at, ticket.at + ticket.rows)
    if topk_ids is None and topk_weights is not None:
        raise InvalidRequest("a site call came with weights of experts, and without the experts")
    flags = (topk_ids is not None) * Flag.HAS_IDS | (topk_weights is not None) * Flag.HAS_WEIGHTS
    ticket.topk_ids = None if topk_ids is None else flat_rows(topk_ids.to(torch.int32))[at]
    ticket.topk_weights = None if topk_weights is None else flat_rows(topk_weights.to(torch.float32))[at]
    shapes = {tuple(part.shape) for part in (ticket.topk_ids, ticket.topk_weights) if part is not None}
    if flags != header.flags & Flag.ROUTED or shapes - {(header.rows, header.topk)}:
        raise InvalidRequest(
            f"a site call with {header.topk} experts a row for {header.rows} rows (flags {header.flags}); "
            f"found {sorted(shapes)} (flags {flags})"
        )


def wide_bytes(ticket: Ticket) -> int:
    """What a call's rows are at its ends, both ways together."""
    header = ticket.header
    return header.rows * (header.in_cols + header.out_cols) * header.torch_dtype.itemsize


def dtype_code(dtype: torch.dtype) -> int:
    """The number of a dtype in a header. InvalidRequest for one that no link carries."""
    if dtype not in DTYPE_CODES:
        raise InvalidRequest(f"a link carries {', '.join(map(str, DTYPE_CODES))}; found {dtype}")
    return DTYPE_CODES[dtype]


def has_columns(ticket: Ticket, cols: int) -> bool:
    """Whether out may be so wide: all of the delta's columns and no more, unless it is a slice at its place."""
    wanted = ticket.out_at + ticket.header.out_cols
    return cols >= wanted if ticket.out_at or ticket.header.out_end else cols == wanted
