"""What a LoRA server holds at the most, counted against the memory it may use before anything of it is allocated."""

from infinilora.lora_server.settings import Settings
from infinilora.runtime.capacity import Term, check_fits, limits_now, tell, tightest

COUNTED_LINKS = 4
"""Engines that are counted to be linked."""
CALL_BUFFERS = 8
"""Of a link, what its site calls take while they compute: rows widened, a delta before it is narrowed, both halves of a
product with every adapter of the step at the largest rank."""
READ_BYTES = 16 << 20
"""What a load holds besides the memory it fills: what is read ahead, and a layer on its way (tiers.py)."""


def check_memory(settings: Settings) -> None:
    """Log the sum, or raise InvalidRequest with every term of it."""
    terms, limit = terms_of(settings), tightest(limits_now(settings.memory_bytes))
    check_fits(terms, limit)
    tell(terms, limit)


def terms_of(settings: Settings) -> list[Term]:
    threads = settings.loader_threads + settings.fetch_threads
    buffers = COUNTED_LINKS * (2 * settings.link_buffers + CALL_BUFFERS)
    in_host = settings.device == "cpu"  # a device's memory is asked of the device
    terms = [
        Term("adapters in the pool", settings.pool_bytes if in_host else 0, "INFINILORA_POOL_BYTES"),
        Term("links", buffers * settings.link_buffer_bytes, "INFINILORA_LINK_BUFFERS, INFINILORA_LINK_BUFFER_BYTES"),
        Term("loads", threads * READ_BYTES, "INFINILORA_LOADER_THREADS, INFINILORA_FETCH_THREADS"),
    ]
    if settings.host_bytes:
        terms.append(Term("adapters in host memory", settings.host_bytes, "INFINILORA_HOST_BYTES"))
    return terms
