"""The LoRA products that bench_kernels times: shapes, where their weights lie, what they must move, torch's ways."""

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from roof import best_of
from torch import Tensor

from infinilora.kernels import abi
from infinilora.kernels.batch import MOE_DOWN, MOE_GATE_UP, Part, SiteWeights, segment_table
from infinilora.kernels.large_pages import large_pages

POOL_BYTES, RING_BYTES, MAX_COPIES = 192 << 20, 8 << 20, 4096
EXPERTS, TOPK = 4, 2
SCALE = 0.5

Way = Callable[[int], object]


class Point(NamedTuple):
    """`rows`: of each adapter. `site`: MOE_GATE_UP or MOE_DOWN where it is one of experts."""

    dtype: torch.dtype
    rank: int
    in_dim: int
    outs: tuple[int, ...]
    rows: tuple[int, ...]
    site: int = 0

    @property
    def out_dim(self) -> int:
        return sum(self.outs)

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    @property
    def experts(self) -> int:
        return EXPERTS if self.site in (MOE_GATE_UP, MOE_DOWN) else 0

    @property
    def block(self) -> int:
        """Elements of one adapter, or of one of its experts."""
        return self.rank * (len(self.outs) * self.in_dim + self.out_dim)

    @property
    def layer(self) -> int:
        return self.block * max(self.experts, 1)

    @property
    def copies(self) -> int:
        """So many layers that none is in a cache when its turn comes again."""
        return max(1, min(POOL_BYTES // (self.layer * len(self.rows) * self.dtype.itemsize), MAX_COPIES))

    @property
    def name(self) -> str:
        spread = f"{len(self.rows)} x {self.rows[0]}" if len(set(self.rows)) == 1 else f"{len(self.rows)} skewed"
        experts = f" of {self.experts} experts" if self.experts else ""
        return f"{str(self.dtype)[6:]} r{self.rank} {self.in_dim}->{self.out_dim}{experts}, {spread}"


class Memory:
    """One run of random numbers of each dtype that all weights are views of, in a pool's memory and as they lie in it.

    An adapter's layers lie one after the other, in each of them A and Bt of its parts.
    """

    def __init__(self) -> None:
        wide, narrow = (large_pages(POOL_BYTES).view(dtype) for dtype in (torch.float32, torch.bfloat16))
        self._flat = {torch.float32: wide.normal_(), torch.bfloat16: narrow}
        narrow.view(2, -1).copy_(wide[: len(narrow) // 2])

    def site(self, point: Point, copy: int, slot: int) -> SiteWeights:
        at, first, parts = (slot * point.copies + copy) * point.layer, 0, []
        for out in point.outs:
            a = self._view(point, at, (point.rank, point.in_dim))
            bt = self._view(point, at + point.rank * point.in_dim, (point.rank, out))
            parts.append(Part(a, bt, SCALE, first))
            at, first = at + point.rank * (point.in_dim + out), first + out
        return tuple(parts)

    def stacked(self, point: Point, copy: int) -> tuple[Tensor, Tensor]:
        """A [S, r, in] and Bt [S, r, out] of the only part of all adapters."""
        (part,) = self.site(point, copy, 0)
        apart = point.copies * point.layer

        def all_slots(t: Tensor) -> Tensor:
            return t.as_strided((len(point.rows), *t.shape), (apart, *t.stride()), t.storage_offset())

        return all_slots(part.a), all_slots(part.bt)

    def _view(self, point: Point, at: int, size: tuple[int, int]) -> Tensor:
        lead, apart = ((point.experts,), (point.block,)) if point.experts else ((), ())
        return self._flat[point.dtype].as_strided((*lead, *size), (*apart, size[1], 1), at)


@dataclass(frozen=True, slots=True)
class Buffers:
    """What calls read and write in turn: as much as a link's rings have, so that each was in use a while ago."""

    xs: list[Tensor]
    outs: list[Tensor]
    ids: Tensor
    routed: Tensor

    @classmethod
    def of(cls, point: Point) -> "Buffers":
        rows, wide = point.num_rows, (TOPK,) if point.experts else ()
        x = (rows, *(wide if point.site == MOE_DOWN else ()), point.in_dim)
        out = (rows, *(wide if point.site == MOE_GATE_UP else ()), point.out_dim)
        ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(rows)]).int()
        return cls(_ring(x), _ring(out), ids, torch.rand(rows, TOPK))


def _ring(shape: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for _ in range(max(2, RING_BYTES // (4 * math.prod(shape))))]


class Calls:
    """The native calls of a point, one for each copy of its weights."""

    def __init__(self, point: Point, memory: Memory, buffers: Buffers) -> None:
        copies, slots = point.copies, len(point.rows)
        starts = [sum(point.rows[:i]) for i in range(slots)]
        self._segments = segment_table(zip(starts, point.rows, range(slots), strict=True))
        self._buffers, self._count = buffers, copies
        self._sites = [
            abi.describe(memory.site(point, copy, slot), in_dim=point.in_dim, out_dim=point.out_dim)
            for slot in range(slots)
            for copy in range(copies)
        ]
        self._table = (ctypes.c_uint64 * len(self._sites))(*(ctypes.addressof(site) for site in self._sites))
        self._calls = (abi.MeasuredCall * copies)(*(self._call(point, copy) for copy in range(copies)))

    def _call(self, point: Point, copy: int) -> abi.MeasuredCall:
        x, out = (ring[copy % len(ring)] for ring in (self._buffers.xs, self._buffers.outs))
        launch = abi.Launch(
            sites=ctypes.addressof(self._table) + 8 * copy,
            slot_stride=self._count,
            segments=self._segments.data_ptr(),
            num_segments=len(point.rows),
            num_slots=len(point.rows),
            rows=point.num_rows,
            topk=TOPK if point.experts else 1,
            in_dim=point.in_dim,
            out_dim=point.out_dim,
            accumulate=0,
            first_column=abi.WHOLE,
            first_input=abi.WHOLE,
        )
        kinds = {MOE_GATE_UP: abi.MEASURE_GATE_UP, MOE_DOWN: abi.MEASURE_DOWN}
        return abi.MeasuredCall(
            launch=launch,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            ids=self._buffers.ids.data_ptr(),
            weights=self._buffers.routed.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            kind=kinds.get(point.site, abi.MEASURE_DENSE),
        )

    def best_s(self, library: ctypes.CDLL, seconds: float) -> float:
        """`best_of` many calls, of copy after copy, no Python between them."""
        times: list[int] = []
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            if library.il_measure_lora(ctypes.addressof(self._calls), self._count):
                raise RuntimeError("the kernels refuse a call of this benchmark")
            times += [call.took_ns for call in self._calls]
        return best_of(times) / 1e9


def weight_bytes(point: Point, buffers: Buffers) -> int:
    """What must come from memory at least: the weights in use, once."""
    weights = len(point.rows)
    if point.experts:
        segments = torch.split(buffers.ids, list(point.rows))
        weights = sum(len(torch.unique(ids)) for ids in segments)
    return weights * point.block * point.dtype.itemsize


def row_bytes(buffers: Buffers) -> int:
    """x and the delta, once, which lie in the last cache."""
    return 4 * (buffers.xs[0].numel() + buffers.outs[0].numel())


def num_flops(point: Point) -> int:
    return 2 * point.num_rows * (TOPK if point.experts else 1) * point.block


def torch_ways(point: Point, memory: Memory, buffers: Buffers) -> list[Way]:
    """A product for each adapter, in the weights' dtype and widened; A and Bt gathered for each row. Of one part."""
    if point.experts or len(point.outs) > 1:
        return []
    row_slot = torch.repeat_interleave(torch.arange(len(point.rows)), torch.tensor(point.rows))
    stacks = [memory.stacked(point, copy) for copy in range(point.copies)]
    sizes = list(point.rows)

    def looped(computed: torch.dtype) -> Way:
        def way(i: int) -> None:
            (a, bt), x, out = stacks[i], buffers.xs[i % len(buffers.xs)], buffers.outs[i % len(buffers.outs)]
            taken_of, rows_of = torch.split(x.to(computed), sizes), torch.split(out, sizes)
            for mine, theirs, taken, to in zip(a, bt, taken_of, rows_of, strict=True):
                to.copy_((taken @ mine.to(computed).T) @ theirs.to(computed)).mul_(SCALE)

        return way

    def gathered(i: int) -> None:
        (a, bt), x, out = stacks[i], buffers.xs[i % len(buffers.xs)], buffers.outs[i % len(buffers.outs)]
        v = torch.bmm(a[row_slot], x.to(point.dtype)[:, :, None])
        out.copy_(torch.bmm(v.transpose(1, 2), bt[row_slot])[:, 0]).mul_(SCALE)

    return [gathered, *(looped(computed) for computed in {point.dtype, torch.float32})]
