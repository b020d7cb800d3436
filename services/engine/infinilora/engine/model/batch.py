"""What one step runs: the rows of several sequences, as tensors, built once a step."""

from dataclasses import dataclass

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
