"""A device's kernels for links whose rows are in this host's memory: carried there, computed, carried back.

A link of the device's own has its rows there already, and passes through. Whoever answers a call finds the delta in the
call's own memory in either case: for a host's link when the kernels return, for a device's when its stream has run.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from infinilora.kernels.step import NativeStep
from infinilora.pool.device import Device
from infinilora.pool.execute import SiteKernels


class CarryingKernels:
    """`SiteKernels` over those of a device. Segments stay on the host."""

    def __init__(self, kernels: SiteKernels, device: Device) -> None:
        self._kernels = kernels
        self._device = device

    def native_step(self) -> NativeStep | None:
        return self._kernels.native_step()

    def dense(self, layer: int, site: int, segments: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        with self._carried(out, accumulate=accumulate) as there:
            self._kernels.dense(layer, site, segments, self._brought(x), there, accumulate=accumulate)

    def dense_columns(
        self,
        layer: int,
        site: int,
        segments: Tensor,
        x: Tensor,
        out: Tensor,
        *,
        first: int,
        first_in: int | None = None,
        accumulate: bool = False,
    ) -> None:
        with self._carried(out, accumulate=accumulate) as there:
            self._kernels.dense_columns(
                layer, site, segments, self._brought(x), there, first=first, first_in=first_in, accumulate=accumulate
            )

    def embed(self, layer: int, segments: Tensor, ids: Tensor, out: Tensor, *, accumulate: bool) -> None:
        with self._carried(out, accumulate=accumulate) as there:
            self._kernels.embed(layer, segments, self._brought(ids), there, accumulate=accumulate)

    def moe_gate_up(
        self, layer: int, segments: Tensor, x: Tensor, topk_ids: Tensor, out: Tensor, *, accumulate: bool
    ) -> None:
        with self._carried(out, accumulate=accumulate) as there:
            brought = self._brought(x), self._brought(topk_ids)
            self._kernels.moe_gate_up(layer, segments, *brought, there, accumulate=accumulate)

    def moe_down(
        self,
        layer: int,
        segments: Tensor,
        act: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        with self._carried(out, accumulate=accumulate) as there:
            brought = self._brought(act), self._brought(topk_ids), self._brought(topk_weights)
            self._kernels.moe_down(layer, segments, *brought, there, accumulate=accumulate)

    def _brought(self, tensor: Tensor) -> Tensor:
        return tensor if self._device.holds(tensor) else self._device.bring(tensor)

    @contextmanager
    def _carried(self, out: Tensor, *, accumulate: bool) -> Iterator[Tensor]:
        """Where the delta is to be written; what was written is in `out` when the block has ended."""
        if self._device.holds(out):
            yield out
            return
        there = self._device.bring(out if accumulate else torch.empty_like(out))
        yield there
        self._device.fetch(out, there)
