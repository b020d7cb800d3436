"""The native library's functions and structures, as ctypes sees them. Mirrors cpu/lora.h and cpu/*.cpp."""

import ctypes
from ctypes import Structure, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import torch
from torch import Tensor

from infinilora.kernels.batch import SiteWeights

MAX_PARTS = 4
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class PartDescriptor(Structure):
    """`il_part`."""

    _fields_ = (
        ("a", c_void_p),
        ("bt", c_void_p),
        ("a_expert_stride", c_int64),
        ("bt_expert_stride", c_int64),
        ("rank", c_int32),
        ("out", c_int32),
        ("out_offset", c_int32),
        ("scale", c_float),
        ("bias", c_void_p),
    )


class SiteDescriptor(Structure):
    """`il_site`. Holds addresses only: whoever keeps it keeps the tensors."""

    _fields_ = (
        ("num_parts", c_int32),
        ("dtype", c_int32),
        ("in_dim", c_int32),
        ("out_dim", c_int32),
        ("num_experts", c_int32),
        ("reserved", c_int32),
        ("parts", PartDescriptor * MAX_PARTS),
    )


WHOLE = -1
"""`first_column` of a launch whose output has all columns of the site, `first_input` of one whose input has."""


class Launch(Structure):
    """`il_launch`."""

    _fields_ = (
        ("sites", c_void_p),
        ("slot_stride", c_int64),
        ("segments", c_void_p),
        ("num_segments", c_int32),
        ("num_slots", c_int32),
        ("rows", c_int32),
        ("topk", c_int32),
        ("in_dim", c_int32),
        ("out_dim", c_int32),
        ("accumulate", c_int32),
        ("first_column", c_int32),
        ("first_input", c_int32),
    )


MEASURE_DENSE, MEASURE_GATE_UP, MEASURE_DOWN = range(3)


class MeasuredCall(Structure):
    """`il_measured`."""

    _fields_ = (
        ("launch", Launch),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("took_ns", c_int64),
        ("kind", c_int32),
        ("reserved", c_int32),
    )


class AttentionCall(Structure):
    """`il_attention`."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out", "block_tables", "query_start", "context_len")),
        ("q_row_stride", c_int64),
        *((n, c_int32) for n in ("sequences", "max_blocks", "block_size", "heads", "kv_heads", "head_dim")),
        ("scale", c_float),
    )


_PTR, _I32, _I64 = c_void_p, c_int32, c_int64

SIGNATURES: dict[str, tuple[type | None, tuple[object, ...]]] = {
    "il_set_threads": (c_int, (c_int,)),
    "il_num_threads": (c_int, ()),
    "il_set_spin": (None, (_I64,)),
    "il_limit_level": (c_int, (c_int,)),
    "il_level": (c_int, ()),
    "il_measure_read": (c_float, (_PTR, _I64)),
    "il_measure_flops": (_I64, (_I64,)),
    "il_linear": (None, (_PTR, _I64, _PTR, _I32, _PTR, _PTR, _I64, _I32, _I32, _I32)),
    "il_lora_dense": (_I32, (_PTR, _PTR, _I64, _PTR, _I64)),
    "il_lora_embed": (_I32, (_PTR, _PTR, _PTR, _I64)),
    "il_lora_moe_gate_up": (_I32, (_PTR, _PTR, _I64, _PTR, _PTR, _I64)),
    "il_lora_moe_down": (_I32, (_PTR, _PTR, _I64, _PTR, _PTR, _PTR, _I64)),
    "il_measure_lora": (_I32, (_PTR, _I32)),
    "il_step_compute": (_I32, (_PTR, c_uint64, *[c_uint32] * 10, _PTR, c_uint32, _PTR, _PTR, _PTR, _PTR)),
    "il_step_shut": (None, (_PTR, c_uint64)),
    "il_paged_attention": (None, (_PTR,)),
    "il_rms_norm": (None, (_PTR, _I64, _PTR, _I64, _PTR, c_float, _PTR, _I32, _I32)),
    "il_silu_mul": (None, (_PTR, _I64, _PTR, _I32, _I32)),
    "il_rope": (None, (_PTR, _I64, _I32, _I32, _PTR, _I32, _PTR, _PTR, _I32, _I32)),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give every function of this room its types, and return the library. Raises AttributeError for a stranger."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def describe(parts: SiteWeights, *, in_dim: int, out_dim: int) -> SiteDescriptor:
    """The descriptor of checked parts. It holds addresses: keep the tensors as long as it."""
    if len(parts) > MAX_PARTS:
        raise ValueError(f"a site has at most {MAX_PARTS} parts; found {len(parts)}")
    site = SiteDescriptor(
        num_parts=len(parts),
        dtype=DTYPE_CODES[parts[0].a.dtype],
        in_dim=in_dim,
        out_dim=out_dim,
        num_experts=parts[0].num_experts,
    )
    for index, part in enumerate(parts):
        site.parts[index] = PartDescriptor(
            a=part.a.data_ptr(),
            bt=part.bt.data_ptr(),
            a_expert_stride=_expert_stride(part.a),
            bt_expert_stride=_expert_stride(part.bt),
            rank=part.rank,
            out=part.out_dim,
            out_offset=part.out_offset,
            scale=part.scale,
            bias=None if part.bias is None else part.bias.data_ptr(),
        )
    return site


def _expert_stride(weights: Tensor) -> int:
    return weights.stride(0) if weights.dim() == 3 else 0
