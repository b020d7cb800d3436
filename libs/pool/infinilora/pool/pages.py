"""The memory of a pool: one arena of bytes, handed out in runs of pages. Knows sizes, not adapters.

    arena  | run of layer 0 | run of layer 1 | free ......... | another adapter's runs | free |

A run is contiguous and begins at a page, so at a multiple of 64 bytes. Not thread-safe: the pool locks around it.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from infinilora.kernels.large_pages import large_pages
from infinilora.protocol.errors import InvalidRequest

PAGE_BYTES = 4096


class Run(NamedTuple):
    """Contiguous pages [start, start + pages) of the arena, and their bytes as asked for: uint8 [num_bytes]."""

    start: int
    pages: int
    data: Tensor


class _Extent(NamedTuple):
    start: int
    pages: int


class PageArena:
    """All pages are free or in exactly one run; free extents are sorted and never touch one another."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        page_bytes: int = PAGE_BYTES,
        memory: Tensor | None = None,
    ) -> None:
        """Over `memory` (uint8, at least `capacity_bytes` of it), or over memory of its own on the host."""
        self.page_bytes = page_bytes
        self.num_pages = capacity_bytes // page_bytes
        if self.num_pages < 1:
            raise InvalidRequest(f"pool_bytes is {capacity_bytes}; wanted at least one page of {page_bytes}")
        self._bytes = large_pages(self.num_pages * page_bytes) if memory is None else memory
        self._free = [_Extent(0, self.num_pages)]

    @property
    def capacity_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def free_bytes(self) -> int:
        return sum(e.pages for e in self._free) * self.page_bytes

    def cost(self, sizes: Iterable[int]) -> int:
        """What runs of these sizes take of the capacity: each is rounded up to pages."""
        return sum(self._pages(size) for size in sizes) * self.page_bytes

    def allocate(self, sizes: Sequence[int]) -> tuple[Run, ...] | None:
        """A run for each size (empty for 0), or None when no arrangement of the free extents was found."""
        pages = [self._pages(size) for size in sizes]
        together = self._take(sum(pages))
        if together is not None:
            starts = [together + sum(pages[:i]) for i in range(len(pages))]
            return tuple(map(self._run, starts, pages, sizes))
        taken: list[_Extent] = []
        # The largest first: they have the fewest places to go.
        for index in sorted(range(len(pages)), key=lambda i: -pages[i]):
            start = self._take(pages[index])
            if start is None:
                for extent in taken:
                    self._give_back(extent)
                return None
            taken.append(_Extent(start, pages[index]))
        order = sorted(range(len(pages)), key=lambda i: -pages[i])
        start_of = {index: extent.start for index, extent in zip(order, taken, strict=True)}
        return tuple(self._run(start_of[i], pages[i], sizes[i]) for i in range(len(pages)))

    def free(self, runs: Iterable[Run]) -> None:
        """Give runs back. Nobody may read or write their data from now on."""
        for run in runs:
            self._give_back(_Extent(run.start, run.pages))

    def check(self, live: Iterable[Run]) -> None:
        """Raise AssertionError unless free extents and these runs together are the arena, each page once."""
        extents = sorted([*self._free, *(_Extent(r.start, r.pages) for r in live if r.pages)])
        at = 0
        for extent in extents:
            assert extent.start == at, f"page {at}: the next extent starts at {extent.start}"
            at += extent.pages
        assert at == self.num_pages, f"{self.num_pages - at} pages are neither free nor in use"

    def _pages(self, num_bytes: int) -> int:
        return -(-num_bytes // self.page_bytes)

    def _run(self, start: int, pages: int, num_bytes: int) -> Run:
        at = start * self.page_bytes
        return Run(start, pages, self._bytes[at : at + num_bytes])

    def _take(self, pages: int) -> int | None:
        """The start of the tightest free extent that holds so many pages, now taken. 0 pages take nothing."""
        if pages == 0:
            return 0
        fits = [e for e in self._free if e.pages >= pages]
        if not fits:
            return None
        best = min(fits, key=lambda e: (e.pages, e.start))
        self._free.remove(best)
        if best.pages > pages:
            insort(self._free, _Extent(best.start + pages, best.pages - pages))
        return best.start

    def _give_back(self, extent: _Extent) -> None:
        if not extent.pages:
            return
        insort(self._free, extent)
        at = self._free.index(extent)
        for left in (at, at - 1):
            if 0 <= left < len(self._free) - 1:
                self._join(left)

    def _join(self, left: int) -> None:
        first, second = self._free[left : left + 2]
        assert first.start + first.pages <= second.start, "a run was freed twice"
        if first.start + first.pages == second.start:
            self._free[left : left + 2] = [_Extent(first.start, first.pages + second.pages)]
