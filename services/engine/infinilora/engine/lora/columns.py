"""A MoE call to a group that cuts experts into columns: each column gets the rows that chose one of its experts.

    choices of a row   | 5 | 0 | 7 | 2 |      eight experts, two columns
    sent to column 0   | row | 0 | 2 |        its own first, filled up with -1 to the most that any row has
    sent to column 1   | row | 1 | 3 |        numbered within the column

Every pair of a row and a choice is in one column, so what is added is each pair's delta once, whatever the columns.
"""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from infinilora.engine.lora.grouplink import GroupLink
from infinilora.engine.lora.interface import Routing
from infinilora.engine.lora.layout import Range, Span
from infinilora.link import ports
from infinilora.link.engine_end import EngineEnd
from infinilora.link.frame import Flag, Header
from infinilora.protocol.adapter import Site, SiteGeometry
from infinilora.protocol.shards import Sharding

NO_EXPERT = -1
"""What the kernels take for a choice that adds nothing."""


class Picks(NamedTuple):
    """What a column gets of a call. rows int64 [D], of x, in order; places int64 [D, n]: which of their choices.

    ids int32 and weights fp32 [D, 1 + n] as they are sent: with the step's row in front. Places beyond a row's own
    choices are of other columns, with NO_EXPERT for an id.
    """

    rows: Tensor
    places: Tensor
    ids: Tensor
    weights: Tensor


def picks_of(routing: Routing, rows: Range, experts: range, first: int = 0) -> Picks | None:
    """The rows of a range that chose one of these experts, and their choices; None where none did.

    `first`: the step's row that is row 0 of the routing.
    """
    ids = routing.topk_ids[rows.start : rows.stop]
    own = (ids >= experts.start) & (ids < experts.stop)
    counts = own.sum(1)
    chosen = counts.nonzero()[:, 0]
    if not len(chosen):
        return None
    own = own[chosen]
    places = own.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())]
    is_own = own.gather(1, places)
    numbers = torch.where(is_own, ids[chosen].gather(1, places) - experts.start, NO_EXPERT)
    chosen += rows.start
    weights = routing.topk_weights[chosen].gather(1, places).float()
    step_rows = (chosen + first)[:, None]
    return Picks(
        chosen,
        places,
        torch.cat([step_rows.to(torch.int32), numbers.to(torch.int32)], 1),
        torch.cat([weights.new_zeros(len(chosen), 1), weights], 1),
    )


class ColumnPicks:
    """The picks of the routing that was seen last: a layer's two MoE sites have the same."""

    def __init__(self, first: int = 0) -> None:
        """`first`: the step's row that is row 0 of every routing."""
        self._first = first
        self._routing: Routing | None = None
        self._found: dict[tuple[Range, range], Picks | None] = {}

    def of(self, routing: Routing, rows: Range, experts: range) -> Picks | None:
        if routing is not self._routing:
            self._routing = routing
            self._found.clear()
        key = rows, experts
        if key not in self._found:
            self._found[key] = picks_of(routing, rows, experts, self._first)
        return self._found[key]


class _Sent(NamedTuple):
    end: EngineEnd
    ticket: ports.Ticket
    picks: Picks


class ColumnsPart:
    """The rows of one span at a MoE site, over all columns. What is sent depends on the choices: each call is new."""

    def __init__(
        self,
        span: Span,
        link: GroupLink,
        sharding: Sharding,
        rows: Range,
        shape: Header,
        geometry: SiteGeometry,
        picks: ColumnPicks,
    ) -> None:
        """`shape`: of a call with all choices; its topk says how many a row has."""
        self.span = span
        self.link = link
        self._sharding = sharding
        self._rows = rows
        self._shape = shape
        self._geometry = geometry
        self._picks = picks
        self._sent: list[_Sent] = []

    @property
    def tickets(self) -> tuple[ports.Ticket, ...]:
        """Of the latest call."""
        return tuple(sent.ticket for sent in self._sent)

    def send(self, step_id: int, layer: int, x: Tensor, routing: Routing | None) -> None:
        """Send x [T, h], or [T, k, f] for MOE_DOWN, to the columns that have a part of it. Never waits."""
        assert routing is not None  # a MoE site has one
        self._sent = []
        for shard in self._sharding.columns_of(layer):
            experts = self._sharding.experts(shard, layer, self._geometry.num_experts)
            if picks := self._picks.of(routing, self._rows, experts):
                self._send_to(self.link.ends[shard], step_id, layer, x, picks)

    def _send_to(self, end: EngineEnd, step_id: int, layer: int, x: Tensor, picks: Picks) -> None:
        is_down = self._geometry.site is Site.MOE_DOWN
        count, width = picks.places.shape
        part = x[picks.rows[:, None], picks.places].flatten(1) if is_down else x[picks.rows]
        shape = self._shape._replace(
            flags=self._shape.flags | Flag.HAS_ROWS,
            row_start=0,
            rows=count,
            in_cols=part.shape[1],
            out_cols=self._geometry.out_dim * (1 if is_down else width),
            topk=width + 1,
        )
        ticket = end.prepare(shape)
        end.send(ticket, step_id, layer, part, picks.ids, picks.weights if is_down else None)
        self._sent.append(_Sent(end, ticket, picks))

    def wait(self, y: Tensor, deadline_s: float) -> float:
        """Add every column's delta to y [T, h], or [T, k, 2f] for MOE_GATE_UP; the seconds that the slowest took."""
        deadline = time.monotonic() + deadline_s
        took_s = 0.0
        for end, ticket, picks in self._sent:
            delta = y.new_empty(ticket.rows, ticket.header.out_cols)
            left_s = max(deadline - time.monotonic(), 0.0)
            took_s = max(took_s, end.wait(ticket, delta, deadline_s=left_s, add=False))
            self._add(y, delta, picks)
        return took_s

    def _add(self, y: Tensor, delta: Tensor, picks: Picks) -> None:
        if self._geometry.site is Site.MOE_DOWN:
            y.index_add_(0, picks.rows, delta)
            return
        choices = picks.rows[:, None] * y.shape[1] + picks.places
        y.view(-1, y.shape[2]).index_add_(0, choices.flatten(), delta.view(-1, y.shape[2]))
