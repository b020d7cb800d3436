"""The weights of a packed site as tensors over the pool's memory. The inverse of how the packed file lays them."""

import torch
from torch import Tensor

from infinilora.kernels.batch import Part, SiteWeights
from infinilora.protocol.adapter import DTYPE_BYTES, SiteEntry, block_spans

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def site_weights(entry: SiteEntry, dtype: str, data: Tensor) -> SiteWeights:
    """Views of `data` (uint8 [entry.num_bytes], 64-byte aligned): a [r, in], bt [r, out], or [E, r, ...] for MoE.

    Experts lie one block apart, so their axis is strided; all else is contiguous.
    """
    spans, block_bytes = block_spans(entry.parts, entry.in_dim, dtype)
    elements = data.view(TORCH_DTYPES[dtype])
    width = DTYPE_BYTES[dtype]

    def view(at_bytes: int, rank: int, columns: int) -> Tensor:
        at = elements.storage_offset() + at_bytes // width
        if not entry.num_experts:
            return elements.as_strided((rank, columns), (columns, 1), at)
        sizes = (entry.num_experts, rank, columns)
        return elements.as_strided(sizes, (block_bytes // width, columns, 1), at)

    return tuple(
        Part(
            a=view(span.a, part.rank, entry.in_dim),
            bt=view(span.bt, part.rank, part.out_dim),
            scale=part.scale,
            out_offset=part.out_offset,
        )
        for part, span in zip(entry.parts, spans, strict=True)
    )
