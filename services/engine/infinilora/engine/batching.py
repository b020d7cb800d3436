"""The tensors of a step from its rows: by numpy, once a step, and little by little where the same sequences decode on.

A step that decodes what the step before decoded differs from it by one position a sequence: positions and contexts move
on, a block table grows where a sequence began a block, and nothing else is looked at.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from itertools import chain
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray

from infinilora.engine.model.batch import Batch
from infinilora.engine.model.ops import Paging
from infinilora.engine.sched.scheduler import Rows
from infinilora.engine.sequence import Sequence

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class BatchBuilder:
    """Of one engine, for one step after the other. A batch may be kept: it is not written to later."""

    def __init__(self, *, block_size: int, device: torch.device) -> None:
        self._size = block_size
        self._device = device
        self._decoding: list[list[int]] = []
        """The blocks of the last step's sequences, if it was one row each; else none. These very lists: a sequence
        that was preempted since then has another, even where it comes back at the next position."""
        self._positions: Int64 = np.empty(0, np.int64)
        self._tables: Int32 = np.empty((0, 0), np.int32)

    def build(self, rows: Many[Rows]) -> Batch:
        """The rows as they come, at least one; each sequence once."""
        sequences = [r.sequence for r in rows]
        counts = _column((r.count for r in rows), len(rows))
        starts = _column((r.start for r in rows), len(rows))
        if counts.max() > 1:
            self._decoding = []
            return self._mixed(rows, sequences, counts, starts)
        blocks = [s.blocks for s in sequences]
        is_next = len(blocks) == len(self._decoding) and all(map(is_, blocks, self._decoding))
        if is_next and np.array_equal(starts, self._positions + 1):
            self._grow(sequences, starts)
        else:
            self._tables = _tables(sequences)
        self._decoding, self._positions = blocks, starts
        tokens = _column((s.tokens[at] for s, at in zip(sequences, starts.tolist(), strict=True)), len(rows))
        return self._batch(tokens, counts, starts, starts, self._tables.copy())

    def _mixed(self, rows: Many[Rows], sequences: list[Sequence], counts: Int64, starts: Int64) -> Batch:
        ends = np.cumsum(counts)
        num_rows = int(ends[-1])
        positions = np.arange(num_rows) - np.repeat(ends - counts - starts, counts)
        tokens = _column(chain.from_iterable(r.sequence.tokens[r.start : r.start + r.count] for r in rows), num_rows)
        return self._batch(tokens, counts, starts, positions, _tables(sequences))

    def _grow(self, sequences: list[Sequence], starts: Int64) -> None:
        """Note the blocks that were taken since the last step: one each for sequences that begin a block."""
        begun = np.flatnonzero(starts % self._size == 0)
        if len(begun):
            blocks = starts[begun] // self._size
            missing = int(blocks.max()) + 1 - self._tables.shape[1]
            if missing > 0:
                self._tables = np.pad(self._tables, ((0, 0), (0, missing)))
            self._tables[begun, blocks] = [sequences[i].blocks[b] for i, b in zip(begun, blocks, strict=True)]

    def _batch(self, tokens: Int64, counts: Int64, starts: Int64, positions: Int64, tables: Int32) -> Batch:
        size, context = self._size, starts + counts
        owner = np.repeat(np.arange(len(counts)), counts)
        slots = tables[owner, positions // size].astype(np.int64) * size + positions % size
        paging = Paging(
            query_start=self._tensor(np.concatenate(([0], np.cumsum(counts))).astype(np.int32)),
            context_len=self._tensor(context.astype(np.int32)),
            block_tables=self._tensor(tables),
            slots=self._tensor(slots),
            query_lens=tuple(counts.tolist()),
            max_context=int(context.max()),
        )
        return Batch(self._tensor(tokens), self._tensor(positions), paging)

    def _tensor(self, array: Int32 | Int64) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _column(numbers: Iterable[int], count: int) -> Int64:
    return np.fromiter(numbers, np.int64, count)


def _tables(sequences: list[Sequence]) -> Int32:
    """Int32 [sequences, most blocks]: the blocks of each, then zeros."""
    lengths = _column((len(s.blocks) for s in sequences), len(sequences))
    tables = np.zeros((len(sequences), int(lengths.max())), np.int32)
    filled = np.arange(tables.shape[1]) < lengths[:, None]
    tables[filled] = np.fromiter(chain.from_iterable(s.blocks for s in sequences), np.int32, int(lengths.sum()))
    return tables
