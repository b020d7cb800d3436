"""Random adapters bound to a SiteTable on any device, for the Triton tests."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from infinilora.kernels.batch import Part, SiteWeights
from infinilora.kernels.site_table import SiteTable
from infinilora.kernels.tile_table import HOPPER_SMS, Cut, Launch, TileTable
from support import lora_maths

NUM_SLOTS = 10
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-14, torch.float16: 1e-6}
"""By the weights' dtype, of the largest value. fp32 and fp16 weights are multiplied in fp32. Against bf16 weights v is
the sum of two bf16 halves: 2^-16 of it is lost where they are rounded, 2^-15 where they are cut (the interpreter)."""

FAULT = 0.05
"""Another adapter's delta differs by about its own size; ours by rounding only."""


def make_bound(
    ranks: Sequence[Sequence[int]],
    outs: Sequence[int],
    *,
    in_dim: int,
    dtypes: Sequence[torch.dtype],
    experts: int = 0,
    gap: int = 0,
    seed: int = 1,
) -> dict[int, SiteWeights]:
    """Slot i has ranks[i] (one for each part) and the dtypes in turn."""
    rng = torch.Generator().manual_seed(seed)
    return {
        slot: lora_maths.random_site(
            rng, r, outs, in_dim=in_dim, experts=experts, dtype=dtypes[slot % len(dtypes)], gap=gap
        )
        for slot, r in enumerate(ranks)
    }


def aligned(bound: Mapping[int, SiteWeights]) -> dict[int, SiteWeights]:
    """The same weights in storage of their own, as a pool lays them out: every row readable in vectors."""
    return {
        slot: tuple(Part(p.a.contiguous().clone(), p.bt.contiguous().clone(), p.scale, p.out_offset) for p in parts)
        for slot, parts in bound.items()
    }


def to_device(bound: Mapping[int, SiteWeights], device: str) -> dict[int, SiteWeights]:
    if device == "cpu":
        return dict(bound)
    return {
        slot: tuple(Part(p.a.to(device), p.bt.to(device), p.scale, p.out_offset) for p in parts)
        for slot, parts in bound.items()
    }


def make_table(
    bound: Mapping[int, SiteWeights], *, num_parts: int, in_dim: int, out_dim: int, device: str
) -> SiteTable:
    table = SiteTable(num_slots=NUM_SLOTS, num_parts=num_parts, in_dim=in_dim, out_dim=out_dim, device=device)
    for slot, parts in to_device(bound, device).items():
        table.bind(slot, parts)
    return table


class RecordingTable(TileTable):
    """Keeps (items, programs) of each launch."""

    def __init__(self, cuts: Mapping[Launch, Cut], *, num_sms: int = HOPPER_SMS) -> None:
        super().__init__(cuts, num_sms=num_sms)
        self.launched: list[tuple[int, int]] = []

    @override
    def num_programs(self, cut: Cut, num_items: int) -> int:
        self.launched.append((num_items, super().num_programs(cut, num_items)))
        return self.launched[-1][1]


class EveryLaunch(RecordingTable):
    """Cuts every shrink, and every expand, as it is told, on a device of `num_sms`."""

    def __init__(self, shrink: Cut, expand: Cut, *, num_sms: int) -> None:
        super().__init__({}, num_sms=num_sms)
        self.by_op = {"shrink": shrink, "expand": expand}

    @override
    def find(self, launch: Launch) -> Cut | None:
        return self.by_op[launch.op]


@contextmanager
def poisoned_scratch() -> Iterator[None]:
    """Every torch.empty is filled with NaN, so that a read of what no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def poisoned(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


def largest_error(found: Tensor, wanted: Tensor | lora_maths.Array) -> float:
    """The largest difference, relative to the largest wanted value."""
    if isinstance(wanted, Tensor):
        wanted = lora_maths.wide(wanted.cpu())
    return float(np.abs(lora_maths.wide(found.cpu()) - wanted).max() / np.abs(wanted).max())
