"""What the head and a follower say to each other over their socket. Tensors go as bytes; nothing is pickled.

head -> follower     Opening; then Want, Drop, TellAgain, Forget, Step
follower -> head     Hello, Ready; then LeaseNews
"""

from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from infinilora.engine.model.batch import Batch
from infinilora.engine.model.ops import Paging
from infinilora.engine.sizes import Sizes
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import WireError
from infinilora.protocol.ids import Digest


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A follower has started."""


class Opening(msgspec.Struct, frozen=True, tag=True):
    """What to hold."""

    card: BaseCard
    sizes: Sizes


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A follower can run steps."""


class Want(msgspec.Struct, frozen=True, tag=True):
    """Take a lease on an adapter. `number` counts the head's wants: news of this one carries it."""

    digest: Digest
    number: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Give the lease up."""

    digest: Digest


class TellAgain(msgspec.Struct, frozen=True, tag=True):
    """These were lost in a step, so that what was told of them before is not believed any more."""

    digests: tuple[Digest, ...]


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The adapter is deleted: let go of its bytes."""

    digest: Digest


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Rows [row_start, row_start + rows) of a step are of an adapter."""

    row_start: int
    rows: int
    digest: Digest


class Rows(msgspec.Struct, frozen=True):
    """A Batch in bytes: int64 token ids, positions and slots; int32 all else."""

    token_ids: bytes
    positions: bytes
    slots: bytes
    query_start: bytes
    context_len: bytes
    block_tables: bytes

    @classmethod
    def of(cls, batch: Batch) -> "Rows":
        paging = batch.paging
        tensors = (
            batch.token_ids,
            batch.positions,
            paging.slots,
            paging.query_start,
            paging.context_len,
            paging.block_tables,
        )
        return cls(*(tensor.cpu().numpy().tobytes() for tensor in tensors))

    def batch(self, device: torch.device) -> Batch:
        starts, context = np.frombuffer(self.query_start, np.int32), np.frombuffer(self.context_len, np.int32)
        tables = np.frombuffer(self.block_tables, np.int32).reshape(len(context), -1)

        def held(data: np.ndarray) -> Tensor:
            return torch.from_numpy(data.copy()).to(device)

        paging = Paging(
            query_start=held(starts),
            context_len=held(context),
            block_tables=held(tables),
            slots=held(np.frombuffer(self.slots, np.int64)),
            query_lens=tuple(np.diff(starts).tolist()),
            max_context=int(context.max()),
        )
        token_ids, positions = (held(np.frombuffer(data, np.int64)) for data in (self.token_ids, self.positions))
        return Batch(token_ids=token_ids, positions=positions, paging=paging)


class Step(msgspec.Struct, frozen=True, tag=True):
    """Take a flow through the layers before `until`. `rows` where it is new; of the others `kept` may still go on.

    With `cut`, in two halves that take turns, of the first so many sequences and of the others; then it is over.
    """

    flow: int
    until: int
    kept: tuple[int, ...]
    segments: tuple[Segment, ...]
    rows: Rows | None = None
    cut: int = 0


class LeaseNews(msgspec.Struct, frozen=True, tag=True):
    """How far a follower is with the adapter of a Want. `error` where it failed."""

    digest: Digest
    number: int
    status: Literal["waiting", "admissible", "resident", "failed"]
    has_slot: bool
    layers_ready: int
    error: WireError | None = None


Order = Opening | Want | Drop | TellAgain | Forget | Step
Report = Hello | Ready | LeaseNews
