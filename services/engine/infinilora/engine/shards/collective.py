"""Sums over the shards of an engine: a torch.distributed process group, held as a value. gloo on a CPU, NCCL on CUDA.

A peer that dies fails the sum at once, one that hangs after `STEP_TIMEOUT_S`: both end this process.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from infinilora.engine.model.cut import Cut
from infinilora.protocol.errors import Unavailable

LOOPBACK = "127.0.0.1"
STEP_TIMEOUT_S = 30.0
"""A sum takes microseconds; what keeps a shard longer than this is not coming back."""


class _Pending(Protocol):
    def wait(self) -> object: ...


class _Group(Protocol):
    """The part of a process group that is used here; torch's own stubs do not have it."""

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = ...) -> _Pending: ...
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> _Pending: ...


class GroupShards:
    """`model.shards.Shards` over a process group. Step thread only."""

    def __init__(self, group: _Group, cut: Cut) -> None:
        self.cut = cut
        self._group = group
        self._most = dist.AllreduceOptions()
        self._most.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._from_head = dist.BroadcastOptions()
        self._from_head.rootRank = 0

    def sum(self, partial: Tensor) -> None:
        self._group.allreduce([partial]).wait()

    def share(self, tensor: Tensor) -> None:
        self._group.broadcast([tensor], self._from_head).wait()

    def most(self, tensor: Tensor) -> None:
        """Make it the largest of all shards', entry by entry, in place."""
        self._group.allreduce([tensor], self._most).wait()


def join_shards(store: Store, cut: Cut, device: str) -> GroupShards:
    """Meet the other shards at a store; blocks until all are there. Raises Unavailable where they do not come."""
    make = _nccl if device.startswith("cuda") else _gloo
    try:
        return GroupShards(make(store, cut), cut)
    except RuntimeError as error:
        raise Unavailable(f"the {cut.num_shards} engine shards did not meet: {error}") from error


def _gloo(store: Store, cut: Cut) -> _Group:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - the only door to a device of one's own choice
    options._devices = [gloo.create_device(hostname=LOOPBACK)]  # noqa: SLF001
    options._timeout = timedelta(seconds=STEP_TIMEOUT_S)  # noqa: SLF001
    group: _Group = gloo(store, cut.shard, cut.num_shards, options)
    return group


def _nccl(store: Store, cut: Cut) -> _Group:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=STEP_TIMEOUT_S)  # noqa: SLF001
    group: _Group = nccl(store, cut.shard, cut.num_shards, options)
    return group
