"""The weights of a packed site as tensors over the pool's memory. The inverse of how the packed file lays them."""

import torch
from torch import Tensor

from infinilora.kernels.batch import Part, SiteWeights
from infinilora.protocol.adapter import DTYPE_BYTES, VECTOR_BYTES, SiteEntry, block_spans
from infinilora.protocol.errors import AdapterFailed

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def site_weights(entry: SiteEntry, dtype: str, data: Tensor) -> SiteWeights:
    """Views of `data` (uint8 [entry.num_bytes], 64-byte aligned): a [r, in], bt [r, out], or [E, r, ...] for MoE.

    Experts lie one block apart, so their axis is strided; all else is contiguous. A bias is fp32 [out]. Column scales
    are no kernel's: `scales` reads them for who has the base's output. Raises AdapterFailed for vectors of experts.
    """
    spans, block_bytes = block_spans(entry.parts, entry.in_dim, dtype)
    elements = data.view(TORCH_DTYPES[dtype])
    vectors = data.view(torch.float32)
    width = DTYPE_BYTES[dtype]

    def view(at_bytes: int, rank: int, columns: int) -> Tensor:
        at = elements.storage_offset() + at_bytes // width
        if not entry.num_experts:
            return elements.as_strided((rank, columns), (columns, 1), at)
        sizes = (entry.num_experts, rank, columns)
        return elements.as_strided(sizes, (block_bytes // width, columns, 1), at)

    def vector(at_bytes: int, columns: int) -> Tensor:
        return vectors.as_strided((columns,), (1,), vectors.storage_offset() + at_bytes // VECTOR_BYTES)

    for part in entry.parts:
        if entry.num_experts and (part.has_bias or part.has_colscale):
            what = "a bias of experts" if part.has_bias else "a column scale of experts"
            where = f"layer {entry.layer} site {entry.site.label} part {part.name}"
            raise AdapterFailed(f"{where}: found {what}, which this version does not compute")
    return tuple(
        Part(
            a=view(span.a, part.rank, entry.in_dim),
            bt=view(span.bt, part.rank, part.out_dim),
            scale=part.scale,
            out_offset=part.out_offset,
            bias=vector(span.bias, part.out_dim) if part.has_bias else None,
        )
        for part, span in zip(entry.parts, spans, strict=True)
    )
