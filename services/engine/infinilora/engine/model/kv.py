"""The paged KV cache: one pair of tensors a layer, [blocks, block size, KV heads, head width]."""

from dataclasses import dataclass

import torch
from torch import Tensor

from infinilora.engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KvCache:
    """Blocks are handed out by `sched.blocks.BlockPool`; here they are only memory."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_rows: tuple[Tensor, ...]
    value_rows: tuple[Tensor, ...]
    """The same memory, [blocks * block size, KV heads, head width]."""

    @classmethod
    def allocate(
        cls, spec: ModelSpec, *, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> "KvCache":
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)

        def layers() -> tuple[Tensor, ...]:
            return tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(spec.num_layers))

        keys, values = layers(), layers()
        return cls(keys, values, tuple(k.flatten(0, 1) for k in keys), tuple(v.flatten(0, 1) for v in values))

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put k, v [T, Hkv, D] at `slots` (block * size + offset)."""
        self.key_rows[layer].index_copy_(0, slots, k)
        self.value_rows[layer].index_copy_(0, slots, v)


def block_bytes(spec: ModelSpec, *, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block in all layers."""
    return 2 * spec.num_layers * block_size * spec.kv_dim * dtype.itemsize
