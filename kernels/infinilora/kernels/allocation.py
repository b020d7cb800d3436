"""What an allocation that failed looks like, whoever made it."""

import torch

_WORDS = ("can't allocate memory", "not enough memory")
"""Of torch's allocators on a CPU, which raise a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or this machine had no memory; whatever was computed is void, and nothing else is broken."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
