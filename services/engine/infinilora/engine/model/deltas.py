"""The LoRA interface bound to one step, as the layers use it: submit, base product, add.

A computation of the model is a generator. Alone it runs to its end (`alone`); of two that take turns, each stops
where it would have to wait for a delta, and goes on once the other has got as far (`in_turns`).

    one    submit, product | ........ | add, attention, submit, product | ........ |
    other  ................ | submit, product | ....................... | add, ...
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from infinilora.engine.lora.interface import LoraBackend, Routing, StepLost, StepPlan, Ticket
from infinilora.engine.model.ops import Linear
from infinilora.protocol.adapter import Site

T = TypeVar("T")
Turns = Generator[None, None, T]
"""A computation of a T that may be left at each of its stops, where a delta is on its way, and taken up again."""


def alone(turns: Turns[T]) -> T:
    """Run it to its end, alone."""
    (result,) = in_turns([turns])
    return result


def in_turns(parts: Sequence[Turns[T]]) -> list[T]:
    """Run them all to their ends, from stop to stop in turn."""
    found: dict[int, T] = {}
    waiting = deque(enumerate(parts))
    while waiting:
        number, turns = waiting.popleft()
        try:
            next(turns)
        except StopIteration as end:
            found[number] = end.value
        else:
            waiting.append((number, turns))
    return [found[number] for number in range(len(parts))]


Stops = Callable[[int, Site], bool]
"""Whether a computation may be left at (layer, site), where a delta may be on its way."""


class Deltas:
    """The deltas of a step, or of some of its rows. Without a plan there are none, and the backend is never asked."""

    def __init__(self, lora: LoraBackend, plan: StepPlan | None, stops: Stops | None = None) -> None:
        """`stops`: where rows that take turns with others are left; None: nowhere."""
        self._lora = lora
        self._plan = plan
        self._stops = stops

    def linear(self, layer: int, site: Site, x: Tensor, weight: Linear) -> Turns[Tensor]:
        """Weight(x) with the site's delta added; the delta is on its way while the product runs."""
        ticket = self.submit(layer, site, x)
        y = weight(x)
        yield from self.add(layer, site, ticket, y)
        return y

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows table[token_ids] [T, h], with the embedding's delta added."""
        y = table[token_ids]
        if self._plan is not None and self._plan.adapts(0, Site.EMBED):
            ids = token_ids.to(torch.int32)[:, None]
            self._take(self.submit(0, Site.EMBED, ids), y)
        return y

    def submit(self, layer: int, site: Site, x: Tensor, routing: Routing | None = None) -> Ticket | None:
        return None if self._plan is None else self._lora.submit(self._plan, layer, site, x, routing)

    def add(self, layer: int, site: Site, ticket: Ticket | None, y: Tensor) -> Turns[None]:
        """What `submit` of this site gave is added to y."""
        if self._stops is not None and self._stops(layer, site):
            yield
        if ticket is not None:
            self._take(ticket, y)

    def _take(self, ticket: Ticket | None, y: Tensor) -> None:
        self._lora.add(ticket, y)


class CarriedDeltas(Deltas):
    """A step on one shard of several: a delta that is lost ends no step, for the others wait in a sum.

    From the loss on the step goes through without deltas, for nothing; `loss` says so at its end. It is left at the
    same stops as without a loss.
    """

    def __init__(self, lora: LoraBackend, plan: StepPlan | None, stops: Stops | None = None) -> None:
        super().__init__(lora, plan, stops)
        self.loss: StepLost | None = None

    @override
    def linear(self, layer: int, site: Site, x: Tensor, weight: Linear) -> Turns[Tensor]:
        before = self.loss
        y = yield from super().linear(layer, site, x, weight)
        return y if self.loss is before else weight(x)  # what was added before the loss is in no cache

    @override
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        y = super().embed(token_ids, table)
        return y if self.loss is None else table[token_ids]

    @override
    def submit(self, layer: int, site: Site, x: Tensor, routing: Routing | None = None) -> Ticket | None:
        try:
            return super().submit(layer, site, x, routing)
        except StepLost as loss:
            self._lose(loss)
            return None

    @override
    def _take(self, ticket: Ticket | None, y: Tensor) -> None:
        if self.loss is not None:
            return
        try:
            super()._take(ticket, y)
        except StepLost as loss:
            self._lose(loss)

    def _lose(self, loss: StepLost) -> None:
        self.loss = loss
        self._plan = None
