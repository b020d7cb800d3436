"""The memory that adapters and weights lie in."""

import pytest
import torch

from infinilora.kernels.cpu_ops import PackedWeight, Storage
from infinilora.kernels.large_pages import SideBySide, large_pages
from infinilora.pool.pages import PageArena
from support.large_pages import LARGE_PAGES, flags_of


def test_adapters_lie_in_large_pages_of_this_process_alone_where_there_are_any() -> None:
    arena = PageArena(8 << 20)
    (run,) = arena.allocate([5000]) or ()
    for bytes_of_adapters in (run.data, large_pages(8 << 20)):
        flags = flags_of(bytes_of_adapters)
        assert ("hg" in flags) == LARGE_PAGES.exists()
        assert "sh" not in flags, "what is shared lies in small pages"


def test_memory_is_as_long_as_asked_for_and_can_be_written() -> None:
    memory = large_pages(5000)
    assert memory.shape == (5000,)
    memory[:] = 7
    assert memory.sum() == 35_000


def test_tensors_side_by_side_are_their_own_and_share_a_chunk_until_it_is_full() -> None:
    memory = SideBySide(1 << 16)
    tensors = [memory.empty((3, n), torch.float32 if n % 2 else torch.bfloat16) for n in range(1, 400)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value % 100)
    for value, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == value % 100).all()
    chunks = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    needed = sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors)
    assert needed / (1 << 16) <= len(chunks) <= needed / (1 << 16) * 1.1 + 1
    assert memory.empty((1 << 16,), torch.float32).shape == (1 << 16,), "one that is larger than a chunk has its own"


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_weights_packed_side_by_side_are_those_packed_alone(storage: Storage) -> None:
    memory, weights = SideBySide(1 << 16), [torch.randn(n, 41) for n in (1, 33, 64, 200)]
    for weight, packed in [(w, PackedWeight.pack(w, storage=storage, memory=memory)) for w in weights]:
        assert torch.equal(packed.panels, PackedWeight.pack(weight, storage=storage).panels)
        assert ("hg" in flags_of(packed.panels)) == LARGE_PAGES.exists()
