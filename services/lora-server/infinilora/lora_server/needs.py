"""What a LoRA server holds at the most, counted against the memory it may use before anything of it is allocated."""

import torch

from infinilora.lora_server.settings import Settings
from infinilora.runtime.capacity import Limit, Term, check_fits, limits_now, tell, tightest

COUNTED_LINKS = 4
"""Engines that are counted to be linked."""
CALL_BUFFERS = 8
"""Of a link, what its site calls take while they compute: rows widened, a delta before it is narrowed, both halves of a
product with every adapter of the step at the largest rank."""
READ_BYTES = 16 << 20
"""What a load holds besides the memory it fills: what is read ahead, and a layer on its way (tiers.py)."""


def check_memory(settings: Settings, device: torch.device) -> None:
    """Log the sums, of this machine's memory and of the device's, or raise InvalidRequest with every term of one."""
    in_host, on_device = terms_of(settings)
    sums = [(in_host, tightest(limits_now(settings.memory_bytes)))]
    if on_device:
        free, all_bytes = torch.cuda.mem_get_info(device)
        sums.append((on_device, Limit(f"the memory of {device}", all_bytes, all_bytes - free)))
    for terms, limit in sums:
        check_fits(terms, limit)
        tell(terms, limit)


def terms_of(settings: Settings) -> tuple[list[Term], list[Term]]:
    """In this machine's memory, and in that of a device beside it."""
    threads = settings.loader_threads + settings.fetch_threads
    buffers = COUNTED_LINKS * (2 * settings.link_buffers + CALL_BUFFERS)
    pool = [Term("adapters in the pool", settings.pool_bytes, "INFINILORA_POOL_BYTES")]
    terms = [
        Term("links", buffers * settings.link_buffer_bytes, "INFINILORA_LINK_BUFFERS, INFINILORA_LINK_BUFFER_BYTES"),
        Term("loads", threads * READ_BYTES, "INFINILORA_LOADER_THREADS, INFINILORA_FETCH_THREADS"),
    ]
    if settings.host_bytes:
        terms.append(Term("adapters in host memory", settings.host_bytes, "INFINILORA_HOST_BYTES"))
    return (pool + terms, []) if settings.device == "cpu" else (terms, pool)
