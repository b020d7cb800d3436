"""An engine's end for activations on a device, over a link that has only host memory: `shm` or `tcp`.

Each call's rows are copied to the host as it is sent, so `send` waits for what computes them; its delta is copied to
the device as it is waited for. Right and slower: where both ends have a device, a link of their own is offered first.
"""

import torch
from torch import Tensor
from typing_extensions import override

from infinilora.link.engine_end import EngineEnd
from infinilora.link.ports import Ticket


class HostedEnd(EngineEnd):
    """What is sent and joined may be on any device; what the port sees is host memory of this end's own."""

    @override
    def send(
        self,
        ticket: Ticket,
        step_id: int,
        layer: int,
        x: Tensor,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> None:
        ids, weights = (None if part is None else part.to("cpu", copy=True) for part in (topk_ids, topk_weights))
        super().send(ticket, step_id, layer, x.to("cpu", copy=True), ids, weights)

    @override
    def wait(self, ticket: Ticket, out: Tensor, *, deadline_s: float, add: bool) -> float:
        delta = torch.empty(out.shape, dtype=out.dtype)
        took_s = super().wait(ticket, delta, deadline_s=deadline_s, add=False)
        rows, columns = slice(ticket.at, ticket.at + ticket.rows), slice(ticket.out_at, None)
        if ticket.out_at or ticket.header.out_end:
            columns = slice(ticket.out_at, ticket.out_at + ticket.header.out_cols)
        target = (out if out.dim() == 2 else out.view(len(out), -1))[rows, columns]
        part = delta.flatten(1)[rows, columns].to(out.device)
        target.add_(part) if add else target.copy_(part)
        return took_s
