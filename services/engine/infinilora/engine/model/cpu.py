"""The CPU's arithmetic: the compiled operations of `kernels.cpu_ops`, activations and cache in fp32."""

from functools import partial

import torch
from torch import Tensor

from infinilora.engine.model.ops import Linear, Paging, Ungrouped
from infinilora.kernels import cpu_ops
from infinilora.kernels.cpu_ops import PackedWeight, Storage
from infinilora.kernels.large_pages import SideBySide


class CpuOps:
    """`Ops` over one persistent pool of threads, shared by the process. `storage`: how weights are kept."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, *, storage: Storage = "fp32", threads: int = 1) -> None:
        self._storage: Storage = storage
        self._memory = SideBySide()
        cpu_ops.set_threads(threads)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        packed = PackedWeight.pack(weight, storage=self._storage, memory=self._memory)
        return partial(cpu_ops.linear, w=packed, bias=None if bias is None else bias.float())

    def stacks(self, num: int, *shapes: tuple[int, int]) -> Ungrouped:  # noqa: ARG002 - the same for all
        return Ungrouped("one product each")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return cpu_ops.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return cpu_ops.rms_norm(x, weight, eps, residual)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        cpu_ops.rope_(q, k, positions, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return cpu_ops.silu_mul(gate_up)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, paging: Paging, scale: float) -> Tensor:
        return cpu_ops.paged_attention(
            q, k_cache, v_cache, paging.block_tables, paging.query_start, paging.context_len, scale
        )
