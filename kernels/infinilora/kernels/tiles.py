"""Cut the rows of a batch into tiles that each use one adapter, or one (adapter, expert): what a program works on.

    dense: a segment of rows            -> tiles of consecutive rows; made once a step, on the host
    MoE:   all (row, choice) pairs,     -> sorted by (slot, expert), the *virtual expert*; made once a site on
           of every adapter at once        the device, without the host ever waiting for the routing

A tile is (start, rows, slot, expert), int32. Tiles beyond the last have 0 rows: their number is a bound.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALL, LARGE = 16, 64
"""Rows of a tile: a tensor core's least for decode, a good product for prefill."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """Which rows of a step use which slot, ready on the device for every site of the step."""

    num_rows: int
    block_rows: int
    tiles: Tensor
    """int32 [n, 4], expert 0."""
    slots: frozenset[int]
    slot_list: Tensor
    """int32 [number of slots]: the slots of the step, each once."""
    slot_index: Tensor
    """int64 [num_rows]: index into slot_list; its length where a row has no adapter."""
    is_gapless: bool
    """Whether every row is in a segment."""

    @classmethod
    def of(cls, segments: Tensor, num_rows: int, device: torch.device | str) -> "StepRows":
        """`segments` int32 [n, 3] (row_start, rows, slot) on the host, in order of rows, not overlapping."""
        listed = _listed(segments, num_rows)
        block_rows = LARGE if max((rows for _, rows, _ in listed), default=0) >= LARGE else SMALL
        tiles = _tiles(listed, block_rows)
        slots = sorted({slot for _, _, slot in listed})
        index = torch.full((num_rows,), len(slots), dtype=torch.int64)
        for start, rows, slot in listed:
            index[start : start + rows] = slots.index(slot)
        return cls(
            num_rows=num_rows,
            block_rows=block_rows,
            tiles=torch.tensor(tiles, dtype=torch.int32).reshape(len(tiles), 4).to(device, non_blocking=True),
            slots=frozenset(slots),
            slot_list=torch.tensor(slots, dtype=torch.int32).to(device, non_blocking=True),
            slot_index=index.to(device, non_blocking=True),
            is_gapless=sum(rows for _, rows, _ in listed) == num_rows,
        )

    @classmethod
    def bounded(cls, num_rows: int, num_slots: int, device: torch.device | str) -> "StepRows":
        """Room for any step of `num_rows` rows over slots below `num_slots`: what a captured graph is launched with.

        No row has an adapter until `refill`. Launches are as many as the fullest step needs; those of a step that has
        fewer tiles end at once.
        """
        num_tiles = num_rows // SMALL + min(num_rows, num_slots)
        return cls(
            num_rows=num_rows,
            block_rows=SMALL,
            tiles=torch.zeros(num_tiles, 4, dtype=torch.int32, device=device),
            slots=frozenset(range(num_slots)),
            slot_list=torch.arange(num_slots, dtype=torch.int32, device=device),
            slot_index=torch.full((num_rows,), num_slots, dtype=torch.int64, device=device),
            is_gapless=False,
        )

    def refill(self, segments: Tensor) -> None:
        """Of a `bounded` one: from here on in the stream it is the step of these segments. Each slot at most once."""
        listed = _listed(segments, self.num_rows)
        num_slots = len(self.slots)
        used = [slot for _, _, slot in listed]
        if any(slot >= num_slots for slot in used) or len(set(used)) < len(used):
            raise ValueError(f"segments of slots {used}: wanted each once and all below {num_slots}")
        tiles, index = torch.zeros_like(self.tiles, device="cpu"), torch.full((self.num_rows,), num_slots)
        for i, tile in enumerate(_tiles(listed, self.block_rows)):
            tiles[i] = torch.tensor(tile)
        for start, rows, slot in listed:
            index[start : start + rows] = slot
        self.tiles.copy_(_sendable(tiles, self.tiles), non_blocking=True)
        self.slot_index.copy_(_sendable(index, self.tiles), non_blocking=True)


def _listed(segments: Tensor, num_rows: int) -> list[tuple[int, int, int]]:
    """(row_start, rows, slot) of the segments that have rows; ValueError for one that the step cannot have."""
    listed = [(start, rows, slot) for start, rows, slot in segments.tolist() if rows]
    for start, rows, slot in listed:
        if start < 0 or rows < 0 or start + rows > num_rows or slot < 0:
            raise ValueError(
                f"segment ({start}, {rows}, {slot}): wanted rows inside 0..{num_rows} and a slot from 0 on"
            )
    return listed


def _tiles(listed: list[tuple[int, int, int]], block_rows: int) -> list[tuple[int, int, int, int]]:
    return [
        (start + at, min(block_rows, rows - at), slot, 0)
        for start, rows, slot in listed
        for at in range(0, rows, block_rows)
    ]


def _sendable(tensor: Tensor, target: Tensor) -> Tensor:
    """Pinned where it goes to a GPU, so that the host need not wait for the copy."""
    return tensor.pin_memory() if target.is_cuda else tensor


@dataclass(frozen=True, slots=True)
class PairTiles:
    """The pairs of a MoE site by virtual expert. Pair p is choice p % k of row p // k."""

    block_rows: int
    order: Tensor
    """int32 [T · k]: pairs, those of one virtual expert side by side."""
    tiles: Tensor
    """int32 [bound, 4]; start counts in `order`."""

    @classmethod
    def of(cls, rows: StepRows, topk_ids: Tensor, num_experts: int) -> "PairTiles":
        """Group the pairs of topk_ids int32 [T, k]. No host synchronisation: shapes depend on shapes only."""
        num_pairs, groups = topk_ids.numel(), len(rows.slots) * num_experts
        block_rows = LARGE if num_pairs >= LARGE * groups else SMALL
        group = _group_of_pairs(rows, topk_ids, num_experts)
        order = torch.argsort(group, stable=True)
        counts = torch.zeros(groups + 1, dtype=torch.int64, device=group.device)
        counts.scatter_add_(0, group, torch.ones_like(group))
        counts = counts[:groups]
        num_tiles = min(num_pairs, num_pairs // block_rows + min(num_pairs, groups))
        tiles = _cut(rows, counts, num_tiles, block_rows, num_experts)
        return cls(block_rows=block_rows, order=order.to(torch.int32), tiles=tiles)


def _group_of_pairs(rows: StepRows, topk_ids: Tensor, num_experts: int) -> Tensor:
    """int64 [T · k]: the number of a pair's virtual expert; the number of all of them where it has none."""
    none = len(rows.slots) * num_experts
    ids = topk_ids.to(torch.int64)
    group = rows.slot_index[:, None] * num_experts + ids
    exists = (ids >= 0) & (ids < num_experts) & (rows.slot_index[:, None] < len(rows.slots))
    return torch.where(exists, group, none).flatten()


def _cut(rows: StepRows, counts: Tensor, num_tiles: int, block_rows: int, num_experts: int) -> Tensor:
    tiles_of = (counts + block_rows - 1) // block_rows
    last_tile, last_pair = tiles_of.cumsum(0), counts.cumsum(0)
    tile = torch.arange(num_tiles, device=counts.device)
    found = torch.searchsorted(last_tile, tile, right=True)
    group = found.clamp(max=len(counts) - 1)
    at = (tile - (last_tile - tiles_of)[group]) * block_rows
    start = (last_pair - counts)[group] + at
    num = (counts[group] - at).clamp(0, block_rows)
    num = torch.where(found < len(counts), num, 0)
    slot = rows.slot_list[group // num_experts]
    return torch.stack([start, num, slot, group % num_experts], dim=1).to(torch.int32)
