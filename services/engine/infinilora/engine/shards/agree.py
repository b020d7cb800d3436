"""Whose deltas were lost in a step, agreed on by all shards: one flag a segment, by maximum."""

from collections.abc import Iterable, Sequence

import torch

from infinilora.engine.lora.interface import StepLost
from infinilora.engine.shards.collective import GroupShards
from infinilora.protocol.ids import Digest


def agree_on_lost(
    shards: GroupShards, digests: Sequence[Digest], lost: Iterable[Digest], device: torch.device
) -> frozenset[Digest]:
    """`digests` are those of the step's segments, the same on every shard; `lost` those lost on this one."""
    own = frozenset(lost)
    flags = torch.tensor([digest in own for digest in digests], dtype=torch.int32, device=device)
    shards.most(flags)
    return frozenset(digest for digest, flag in zip(digests, flags.tolist(), strict=True) if flag)


def lost_by(loss: StepLost | None, digests: Sequence[Digest]) -> frozenset[Digest]:
    """The digests of a step that a loss is about: all where it names none."""
    if loss is None:
        return frozenset()
    return loss.digests & frozenset(digests) or frozenset(digests)
