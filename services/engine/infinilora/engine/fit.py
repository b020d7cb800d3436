"""Fits an engine into the memory it may use, before it reads a weight: what is derived gives way, the rest is checked.

A CPU's shards share this machine's memory, so that all of them are counted; on CUDA each has a device of its own.
"""

from dataclasses import replace

import torch

from infinilora.engine.assemble import ModelOptions, activation_dtype, bytes_per_block, sizes_of
from infinilora.engine.model.cut import Cut
from infinilora.engine.model.spec import read_spec
from infinilora.engine.needs import Workload, link_bytes, terms_of
from infinilora.engine.settings import Settings
from infinilora.runtime.capacity import Limit, Term, check_fits, tell, total

KV = "keys and values"
LESS_KV = "INFINILORA_KV_BYTES, INFINILORA_MAX_RUNNING, INFINILORA_MAX_MODEL_LEN"


def fitted(settings: Settings, options: ModelOptions, num_shards: int, host: Limit) -> ModelOptions:
    """The options, with as much for keys and values as there is room for. Raises InvalidRequest, with the sum.

    `host`: what this process may use of this machine's memory.
    """
    beside = _beside(settings)
    if settings.device == "cuda":
        check_fits(beside, host)
        tell(beside, host)
        free, all_bytes = torch.cuda.mem_get_info()
        return _with_model(settings, options, num_shards, Limit("the CUDA device", all_bytes, all_bytes - free), [])
    return _with_model(settings, options, num_shards, host, beside)


def _with_model(
    settings: Settings, options: ModelOptions, num_shards: int, limit: Limit, beside: list[Term]
) -> ModelOptions:
    spec, cut = read_spec(options.directory), Cut(0, num_shards)
    shards = num_shards if settings.device == "cpu" else 1
    model = [*terms_of(spec, cut, _workload(settings, options)), *_adapters(settings)]
    terms = [*(term._replace(num_bytes=shards * term.num_bytes) for term in model), *beside]
    least = options.kv_bytes or bytes_per_block(options, spec, cut)
    check_fits([*terms, Term(KV, shards * least, LESS_KV)], limit)
    options = replace(options, most_kv_bytes=(limit.left_bytes - total(terms)) // shards)
    terms.append(Term(KV, shards * sizes_of(options, spec, cut).kv_bytes, LESS_KV))
    check_fits(terms, limit)
    tell(terms, limit)
    return options


def _workload(settings: Settings, options: ModelOptions) -> Workload:
    width = activation_dtype(options).itemsize
    stored = 2 if settings.dtype == "bf16" else width
    return Workload(rows=settings.step_tokens, max_running=settings.max_running, width=width, stored_width=stored)


def _adapters(settings: Settings) -> list[Term]:
    """The pool of this process, in the memory that it computes in."""
    if settings.lora == "local":
        return [Term("adapters in the pool", settings.pool_bytes, "INFINILORA_POOL_BYTES")]
    if settings.lora == "remote" and settings.hybrid_bytes:
        return [Term("adapters in the pool", settings.hybrid_bytes, "INFINILORA_HYBRID_BYTES")]
    return []


def _beside(settings: Settings) -> list[Term]:
    """What lies in this machine's memory, whatever computes."""
    terms = []
    if settings.host_bytes and (settings.lora == "local" or settings.hybrid_bytes):
        terms.append(Term("adapters in host memory", settings.host_bytes, "INFINILORA_HOST_BYTES"))
    if settings.lora == "remote":
        rings = link_bytes(buffers=settings.link_buffers, buffer_bytes=settings.link_buffer_bytes)
        terms.append(Term("links", rings, "INFINILORA_LINK_BUFFERS, INFINILORA_LINK_BUFFER_BYTES"))
    return terms
