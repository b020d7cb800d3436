"""Where the weights of a site are, as the Triton kernels read it: one record of numbers for each (slot, part).

    table [num_slots, num_parts, FIELDS] int64 on the device, read by every program of a launch

A record holds addresses and the true rank, so one launch serves adapters of unlike ranks without padding and
without a copy. Rank 0 means: nothing is bound here. Knows no kernel; holds no weights (the caller does).
"""

import itertools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from infinilora.kernels.batch import SiteWeights
from infinilora.kernels.tile_table import TileTable

A_ADDRESS, BT_ADDRESS, RANK, OUT_OFFSET, OUT_DIM, SCALE_BITS, KIND, A_EXPERT, BT_EXPERT, FIELDS = range(10)
"""The fields of a record. Scale is the fp32 bit pattern; the last two are elements from expert to expert."""

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtype of a record's weights is KINDS[kind]; the kernels spell the numbers out."""

_VECTOR_BYTES = 16
_VECTOR_COLUMNS = 8


class SiteTable:
    """The records of one (layer, site) on one device, and what of them the host knows. Bound whole, cleared whole.

    Records are written on the current stream: a slot may change while launches that do not name it run.
    """

    def __init__(
        self, *, num_slots: int, num_parts: int, in_dim: int, out_dim: int, device: torch.device | str
    ) -> None:
        self.num_slots = num_slots
        self.num_parts = num_parts
        self.in_dim = in_dim
        self.out_dim = out_dim
        self.num_experts = 0
        self.records = torch.zeros(num_slots, num_parts, FIELDS, dtype=torch.int64, device=device)
        self.tiles = TileTable.of_device(self.records.device)
        self._bound: dict[int, SiteWeights] = {}
        self.summary = Summary.of({})

    def bind(self, slot: int, parts: SiteWeights) -> None:
        """From now on rows of `slot` get these parts, which must outlive the binding."""
        if len(parts) > self.num_parts:
            raise ValueError(f"{len(parts)} parts for a site of {self.num_parts}")
        if self._bound and parts[0].num_experts != self.num_experts:
            raise ValueError(f"{parts[0].num_experts} experts for a site of {self.num_experts}")
        self._bound[slot] = parts
        self.num_experts = parts[0].num_experts
        rows = [_record(parts, index) for index in range(len(parts))]
        rows += [[0] * FIELDS] * (self.num_parts - len(parts))
        self.records[slot] = torch.tensor(rows, dtype=torch.int64)
        self.summary = Summary.of(self._bound)

    def clear(self, slot: int) -> None:
        """Rows of `slot` get nothing from now on."""
        if self._bound.pop(slot, None) is not None:
            self.records[slot] = 0
            self.summary = Summary.of(self._bound)

    def items(self) -> tuple[tuple[int, SiteWeights], ...]:
        """What is bound: (slot, parts)."""
        return tuple(self._bound.items())

    def covers(self, slots: frozenset[int]) -> bool:
        """Whether the parts of each of these slots fill every output column."""
        return all(
            slot in self._bound and sum(part.out_dim for part in self._bound[slot]) == self.out_dim for slot in slots
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """What a launch must know of everything bound, worked out when something is bound and not at each launch."""

    max_rank: int
    kinds: tuple[tuple[int, bool], ...]
    """(dtype, whether all its rows and output columns start on 16 bytes, to be moved in vectors); a launch for each."""

    @classmethod
    def of(cls, bound: dict[int, SiteWeights]) -> "Summary":
        aligned: dict[int, bool] = {}
        max_rank = 0
        for part in itertools.chain.from_iterable(bound.values()):
            kind = KINDS.index(part.a.dtype)
            columns = part.out_offset % _VECTOR_COLUMNS == 0
            aligned[kind] = aligned.get(kind, True) and columns and _aligned(part.a) and _aligned(part.bt)
            max_rank = max(max_rank, part.rank)
        return cls(max_rank=max_rank, kinds=tuple(sorted(aligned.items())))


def _record(parts: SiteWeights, index: int) -> list[int]:
    part = parts[index]
    record = [0] * FIELDS
    record[A_ADDRESS], record[BT_ADDRESS] = part.a.data_ptr(), part.bt.data_ptr()
    record[RANK], record[OUT_OFFSET], record[OUT_DIM] = part.rank, part.out_offset, part.out_dim
    record[SCALE_BITS] = int.from_bytes(struct.pack("<f", part.scale), "little", signed=True)
    record[KIND] = KINDS.index(part.a.dtype)
    if part.num_experts:
        record[A_EXPERT], record[BT_EXPERT] = part.a.stride(0), part.bt.stride(0)
    return record


def _aligned(tensor: Tensor) -> bool:
    width = tensor.element_size()
    strides = [tensor.shape[-1], tensor.stride(0) if tensor.dim() == 3 else 0]
    return tensor.data_ptr() % _VECTOR_BYTES == 0 and all(s * width % _VECTOR_BYTES == 0 for s in strides)
