"""Which rows of a step go where: pure, made once for a set of rows and kept while the same rows run.

rows    | a a a | b | c c |   base   |
span    |  group 0  | group 1 |            a span is a run of rows of one group
range         | b |                        the rows of a span that some adapter adapts at (layer, site)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infinilora.engine.lora.interface import AdapterRows
from infinilora.engine.lora.scales import ScaledRows
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import Internal
from infinilora.protocol.ids import Digest


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring segments under leases of one group, in row order."""

    group: str
    segments: tuple[AdapterRows, ...]

    @property
    def digests(self) -> frozenset[Digest]:
        return frozenset(segment.lease.digest for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Range:
    """Rows [start, stop) of a step, within span number `span`."""

    span: int
    start: int
    stop: int


KEPT_WINDOWS = 8
"""Of one set of adapter rows: where a step is cut depends on its base rows too, which change."""


class Layout:
    """The spans of a step's rows and, for each site, the ranges to send. Raises Internal for rows out of order."""

    def __init__(self, rows: Sequence[AdapterRows]) -> None:
        self.rows = tuple(rows)
        self.spans = tuple(_spans(self.rows))
        self.num_rows = self.rows[-1].row_start + self.rows[-1].rows if rows else 0
        self._ranges: dict[tuple[int, Site], tuple[Range, ...]] = {}
        self.has_scales = any(segment.lease.scales is not None for segment in self.rows)
        self._scaled: dict[tuple[int, Site], tuple[ScaledRows, ...]] = {}
        self._windows: dict[tuple[int, int], Layout] = {}

    def window(self, start: int, stop: int) -> "Layout":
        """What lies in rows [start, stop), counted from `start`; the same object for the same windows."""
        known = self._windows.get((start, stop))
        if known is None:
            if len(self._windows) >= KEPT_WINDOWS:
                self._windows.clear()
            known = self._windows[start, stop] = Layout(clip(self.rows, start, stop))
        return known

    def ranges(self, layer: int, site: Site) -> tuple[Range, ...]:
        """One range at most for each span; none where nothing is adapted."""
        known = self._ranges.get((layer, site))
        if known is None:
            found = (_range(number, span, layer, site) for number, span in enumerate(self.spans))
            known = self._ranges[layer, site] = tuple(r for r in found if r is not None)
        return known

    def scaled(self, layer: int, site: Site) -> tuple[ScaledRows, ...]:
        """The rows whose adapter scales the base's output at a site; most steps have none anywhere."""
        if not self.has_scales:
            return ()
        known = self._scaled.get((layer, site))
        if known is None:
            known = self._scaled[layer, site] = tuple(
                ScaledRows(slice(s.row_start, s.row_start + s.rows), s.lease.scales)
                for s in self.rows
                if s.lease.scales is not None and s.lease.scales.has(layer, site)
            )
        return known


def clip(rows: Sequence[AdapterRows], start: int, stop: int) -> tuple[AdapterRows, ...]:
    """What lies in rows [start, stop) of a step, counted from `start`."""
    cut = ((max(r.row_start, start), min(r.row_start + r.rows, stop), r.lease) for r in rows)
    return tuple(AdapterRows(first - start, end - first, lease) for first, end, lease in cut if first < end)


def _spans(rows: Sequence[AdapterRows]) -> Iterator[Span]:
    run: list[AdapterRows] = []
    end = 0
    for segment in rows:
        if segment.row_start < end or segment.rows < 1:
            raise Internal(f"rows of a step are out of order: {segment.row_start} comes after {end}")
        if run and (segment.lease.group != run[0].lease.group or segment.row_start != end):
            yield Span(run[0].lease.group, tuple(run))
            run = []
        run.append(segment)
        end = segment.row_start + segment.rows
    if run:
        yield Span(run[0].lease.group, tuple(run))


def _range(number: int, span: Span, layer: int, site: Site) -> Range | None:
    adapting = [s for s in span.segments if _adapts(s, layer, site)]
    if not adapting:
        return None
    return Range(number, adapting[0].row_start, adapting[-1].row_start + adapting[-1].rows)


def _adapts(segment: AdapterRows, layer: int, site: Site) -> bool:
    masks = segment.lease.layer_sites
    return layer < len(masks) and bool(masks[layer] >> site & 1)
