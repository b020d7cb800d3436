"""The GPU's half of SlotKernels: a SiteTable for each (layer, site), and the rows of the step that is running.

The same calls with the same meaning as SlotKernels; tensors on the device, segments on the host. Each thread launches
on its own stream, so that nothing on the device may pass from one to another before it is there: records are written on
one stream and waited for by who binds; the rows of a step are each thread's own.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from infinilora.kernels import moe
from infinilora.kernels.batch import MOE_DOWN, MOE_GATE_UP, NUM_SITES, SiteWeights
from infinilora.kernels.site_table import SiteTable
from infinilora.kernels.tiles import StepRows

SegmentRows = tuple[tuple[int, ...], ...]


class DeviceSites:
    """What is resident on one device. Thread-safe as SlotKernels is: calls may run beside `bind`."""

    def __init__(self, *, num_slots: int, num_layers: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self._tables: list[SiteTable | None] = [None] * (num_layers * NUM_SITES)
        self._binding = threading.Lock()
        self._writes = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._replaced: list[SiteTable] = []
        """Narrower tables than those in force: a launch on any stream may still read one."""
        self._steps = threading.local()

    def bind(self, slot: int, layer: int, site: int, parts: SiteWeights, in_dim: int, out_dim: int) -> None:
        """Rows of `slot` get these parts from now on. A table that is too narrow for them is replaced whole.

        When it returns, every stream sees the records.
        """
        place = layer * NUM_SITES + site
        with self._writing():
            table = self._tables[place]
            if table is not None and (table.in_dim, table.out_dim) != (in_dim, out_dim):
                raise ValueError(f"found {in_dim} -> {out_dim} columns; the site has {table.in_dim} -> {table.out_dim}")
            if table is None or table.num_parts < len(parts):
                wider = SiteTable(
                    num_slots=self.num_slots, num_parts=len(parts), in_dim=in_dim, out_dim=out_dim, device=self.device
                )
                if table is not None:
                    for other, bound in table.items():
                        wider.bind(other, bound)
                    self._replaced.append(table)
                table = wider
            table.bind(slot, parts)
            if self._writes is not None:
                self._writes.synchronize()
            self._tables[place] = table

    def clear(self, slot: int) -> None:
        """Rows of `slot` get nothing at any site from now on. Only when no launch that names it is left to run."""
        with self._writing():
            for table in self._tables:
                if table is not None:
                    table.clear(slot)

    def dense(self, layer: int, site: int, segments: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Add the deltas of a dense site: out[t] (+)= delta of x[t] at (layer, site) under the slot of t's segment."""
        if table := self._bound(layer, site, out, accumulate=accumulate):
            moe.dense(table, self._step_rows(segments, len(x)), x, out, accumulate=accumulate)

    def moe_gate_up(
        self, layer: int, segments: Tensor, x: Tensor, topk_ids: Tensor, out: Tensor, *, accumulate: bool
    ) -> None:
        """Deltas of gate and up. x [T, h]; topk_ids int32 [T, k]; out [T, k, 2f]."""
        if table := self._bound(layer, MOE_GATE_UP, out, accumulate=accumulate):
            moe.moe_gate_up(table, self._step_rows(segments, len(x)), x, topk_ids, out, accumulate=accumulate)

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
        """Deltas of down. act [T, k, f]; topk_weights [T, k]; out [T, h], weighted and summed over k."""
        if table := self._bound(layer, MOE_DOWN, out, accumulate=accumulate):
            rows = self._step_rows(segments, len(act))
            moe.moe_down(table, rows, act, topk_ids, topk_weights, out, accumulate=accumulate)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One at a time, and all on one stream: what is written later stays."""
        with self._binding, torch.cuda.stream(self._writes):
            yield

    def _bound(self, layer: int, site: int, out: Tensor, *, accumulate: bool) -> SiteTable | None:
        table = self._tables[layer * NUM_SITES + site]
        if table is None and not accumulate:
            out.zero_()
        return table

    def _step_rows(self, segments: Tensor, num_rows: int) -> StepRows:
        """The step's rows, made once for all its sites. Compared by value: callers may reuse a tensor."""
        wanted = tuple(tuple(row) for row in segments.tolist())
        latest: tuple[SegmentRows, StepRows] | None = getattr(self._steps, "latest", None)
        if latest is None or latest[0] != wanted or latest[1].num_rows != num_rows:
            latest = self._steps.latest = (wanted, StepRows.of(segments, num_rows, self.device))
        return latest[1]
