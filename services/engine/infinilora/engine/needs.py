"""What an engine holds at the most, in bytes by purpose: weights, keys and values, the largest step, adapters, links.

The arithmetic is of the tensors that the decoder and the sampler make, as if those of a layer's wider half lived at
once: an upper bound, a few times what most steps take. Pure.
"""

from dataclasses import dataclass

from infinilora.engine.model.cut import Cut, local_spec, weight_numbers
from infinilora.engine.model.spec import ModelSpec
from infinilora.runtime.capacity import Term

SAMPLED_BYTES = 64
"""Of each logit of a row that is sampled: fp32 logits, their logarithms, weights; sorted and summed in float64."""
SCORED_BYTES = 12
"""Of each logit of a prompt's row that is scored."""
SCORED_ROWS = 128
LOADING_FLOWS = 4
"""Passes that wait for a layer, each with what it has computed (scheduler.py)."""
PACKING_COPIES = 3
"""Of the largest matrix while it is laid out: as read, padded, packed."""
COUNTED_LINKS = 4
"""LoRA server groups that an engine is counted to be linked to."""
MAX_RANK = 512
"""A gateway's limit: what a row and choice take between shrink and expand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the settings allow at once. `rows` of a step; `max_running` of them are sampled."""

    rows: int
    max_running: int
    width: int
    """Bytes of a number of the activations."""
    stored_width: int
    """Bytes of a number of the packed weights."""


def weight_bytes(spec: ModelSpec, cut: Cut, work: Workload) -> int:
    """Of one shard. The embedding is kept as activations are."""
    own = local_spec(spec, cut)
    embedding = own.vocab_size * own.hidden_dim
    rest = weight_numbers(spec, cut) - embedding
    return embedding * work.width + rest * work.stored_width


def row_numbers(spec: ModelSpec) -> int:
    """Numbers of one row of a step between two layers, and within the wider half of one."""
    h, q, kv = spec.hidden_dim, spec.q_dim, spec.kv_dim
    return 4 * h + max(2 * (q + 2 * kv) + 2 * q, 3 * spec.mlp_dim, _moe_numbers(spec))


def _moe_numbers(spec: ModelSpec) -> int:
    """Rows by expert, gate and up, act and down, each gathered and put together again; router and shared expert."""
    if spec.moe is None:
        return 0
    moe = spec.moe
    return moe.top_k * (3 * spec.hidden_dim + 6 * moe.expert_dim) + 4 * moe.num_experts + 3 * moe.shared_dim


def step_bytes(spec: ModelSpec, work: Workload) -> int:
    """Of the largest step, with what parked passes keep."""
    sampled = min(work.rows, work.max_running)
    logits = spec.vocab_size * max(sampled * SAMPLED_BYTES, min(work.rows, SCORED_ROWS) * SCORED_BYTES)
    choices = spec.moe.top_k if spec.moe else 1
    between = work.rows * choices * MAX_RANK * 4
    parked = LOADING_FLOWS * 2 * spec.hidden_dim
    return work.rows * (row_numbers(spec) + parked) * work.width + logits + between


def packing_bytes(spec: ModelSpec) -> int:
    """While the largest matrix is read, in fp32; nothing runs then."""
    largest = max(rows * columns for rows, columns in _matrices(spec))
    return PACKING_COPIES * largest * 4


def _matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    h, f = spec.hidden_dim, spec.moe.expert_dim if spec.moe else spec.mlp_dim
    return [(spec.vocab_size, h), (spec.q_dim + 2 * spec.kv_dim, h), (2 * max(f, spec.mlp_dim), h)]


def link_bytes(*, buffers: int, buffer_bytes: int) -> int:
    """Both rings of every link that is counted."""
    return COUNTED_LINKS * 2 * buffers * buffer_bytes


def terms_of(spec: ModelSpec, cut: Cut, work: Workload) -> list[Term]:
    """What the model itself takes besides its keys and values."""
    own = local_spec(spec, cut)
    largest = max(step_bytes(own, work), packing_bytes(own))
    return [
        Term("weights", weight_bytes(spec, cut, work), "more INFINILORA_ENGINE_SHARDS, or a bf16 INFINILORA_DTYPE"),
        Term(f"a step of {work.rows} rows", largest, "INFINILORA_STEP_TOKENS, INFINILORA_MAX_RUNNING"),
    ]
