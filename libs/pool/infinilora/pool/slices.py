"""Which columns of a site one shard of an engine computes with: of its outputs, or of its inputs. Pure.

A column-parallel site has runs of output columns (those of q, of k, of v), a row-parallel one a run of input columns
and a partial delta of all output columns. What a shard has whole is not in the table.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from infinilora.protocol.adapter import Site


class SiteSlice(NamedTuple):
    """Columns [begin, end) of the whole site: of its input (None: all), and rising runs of its output (none: all)."""

    inputs: tuple[int, int] | None = None
    outputs: tuple[tuple[int, int], ...] = ()

    def of(self, vector: Tensor) -> Tensor:
        """The entries of a vector [out] of the whole site that are of this shard's outputs."""
        return torch.cat([vector[begin:end] for begin, end in self.outputs]) if self.outputs else vector


WHOLE = SiteSlice()

SiteSlices = Mapping[tuple[int, Site], SiteSlice]
"""By (layer, site)."""
