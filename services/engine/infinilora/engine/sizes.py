"""From memory and the model's own limits to blocks and lengths. Pure; logged once at start."""

from dataclasses import dataclass

from infinilora.protocol.errors import InvalidRequest

DEFAULT_MAX_LEN = 8192
DEFAULT_KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one engine can hold."""

    max_model_len: int
    num_blocks: int
    block_size: int
    kv_bytes: int


def derive_sizes(
    *,
    max_exact_len: int,
    wanted_len: int,
    bytes_per_block: int,
    block_size: int,
    wanted_kv_bytes: int,
    max_running: int,
    most_kv_bytes: int | None = None,
) -> Sizes:
    """Blocks for `wanted_kv_bytes`, or (0) for `max_running` sequences of a quarter of the longest.

    What is derived is at most 2 GiB, and `most_kv_bytes`.

    At least one sequence of the longest length must fit: a longest length that was not asked for gives way.
    """
    if wanted_len > max_exact_len:
        raise InvalidRequest(f"max_model_len is {wanted_len}; this model is computed exactly up to {max_exact_len}")
    longest = wanted_len or min(max_exact_len, DEFAULT_MAX_LEN)
    one = -(-longest // block_size)
    if wanted_kv_bytes == 0:
        num_blocks = max(one, min(DEFAULT_KV_BYTES // bytes_per_block, max_running * one // 4))
        if most_kv_bytes is not None:
            num_blocks = min(num_blocks, most_kv_bytes // bytes_per_block)
    else:
        num_blocks = wanted_kv_bytes // bytes_per_block
    if num_blocks < one:
        if wanted_len or num_blocks == 0:
            raise InvalidRequest(
                f"kv_bytes of {wanted_kv_bytes or most_kv_bytes} holds {num_blocks} blocks of {block_size} tokens; "
                f"one sequence of {longest} tokens needs {one} blocks, {one * bytes_per_block} bytes"
            )
        longest = num_blocks * block_size
    return Sizes(longest, num_blocks, block_size, num_blocks * bytes_per_block)
