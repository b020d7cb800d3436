"""What one step runs: the rows of several sequences, as tensors, built once a step."""

from dataclasses import dataclass, replace

from torch import Tensor

from infinilora.engine.model.ops import Paging


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids and positions int64 [T]; rows of one adapter are neighbours, base rows last."""

    token_ids: Tensor
    positions: Tensor
    paging: Paging

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def halves(self, cut: int) -> tuple["Batch", "Batch"]:
        """The rows of the first `cut` sequences, and those of the others; views, but for where sequences begin.

        `max_context` stays that of the whole step.
        """
        row = sum(self.paging.query_lens[:cut])
        return self._part(slice(None, cut), slice(None, row), 0), self._part(slice(cut, None), slice(row, None), row)

    def _part(self, sequences: slice, rows: slice, first_row: int) -> "Batch":
        paging = self.paging
        starts = slice(sequences.start, None if sequences.stop is None else sequences.stop + 1)
        part = replace(
            paging,
            query_start=paging.query_start[starts] - first_row,
            context_len=paging.context_len[sequences],
            block_tables=paging.block_tables[sequences],
            slots=paging.slots[rows],
            query_lens=paging.query_lens[sequences],
        )
        return Batch(self.token_ids[rows], self.positions[rows], part)
