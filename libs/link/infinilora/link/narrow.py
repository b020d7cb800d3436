"""Rows as eight-bit integers with a scale of their own: where bytes cross a network, and somebody asks for it.

    row     scale fp32 | cols x int8 | zeros up to the next 4 bytes        x = scale * q, scale = max|x| / 127

Of a row with largest magnitude m every element comes back within m / 254, and one rounding to its own dtype. A row with
a NaN or an infinity comes back as NaN altogether: it is not made to look right.
"""

from typing import Literal

import torch
from torch import Tensor

Narrowing = Literal["never", "load", "always"]

MIN_COLS = 16
"""Of both ways: narrower rows would hardly shrink, or grow."""

_SCALE_BYTES = 4
_MOST = 127.0


def row_bytes(cols: int) -> int:
    """Of a row as it travels."""
    return _SCALE_BYTES + -(-cols // 4) * 4


def narrowed(x: Tensor) -> Tensor:
    """The rows of x [T, cols] as they travel: uint8 [T, row_bytes(cols)]."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True) / _MOST
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    # What is divided by 0 or NaN scales to 0 or NaN again.
    steps = (wide / scale).round_().nan_to_num_(nan=0.0).clamp_(-_MOST, _MOST)
    rows = torch.zeros(x.shape[0], row_bytes(x.shape[1]), dtype=torch.uint8, device=x.device)
    rows.view(torch.float32)[:, :1] = scale
    rows.view(torch.int8)[:, _SCALE_BYTES : _SCALE_BYTES + x.shape[1]] = steps
    return rows


def widened(rows: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    """The x [T, cols] of narrowed rows; a copy."""
    steps = rows.view(torch.int8)[:, _SCALE_BYTES : _SCALE_BYTES + cols]
    return (steps * rows.view(torch.float32)[:, :1]).to(dtype)


def is_narrow(narrowing: Narrowing, *, call_bytes: int, waiting_bytes: int, limit_bytes: int) -> bool:
    """Whether a call that moves `call_bytes`, both ways together, goes narrow while `waiting_bytes` are under way.

    Under `load` it does where both together are more than `limit_bytes`.
    """
    if narrowing == "load":
        return call_bytes + waiting_bytes > limit_bytes
    return narrowing == "always"
