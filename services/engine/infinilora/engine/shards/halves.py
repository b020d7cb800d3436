"""A step in two halves that take turns, on one of several shards: every shard leaves each half at the same places.

one half     qkv ......... o, sum | gate_up ........ down, sum | ...
the other    ... qkv ......... o, sum | gate_up ........ down, sum

The sums of a process group have no names: the n-th of one shard is the n-th of every other. So which half's turn it is
must not depend on what a shard knows alone: neither on which sites its leases adapt, nor on whether a delta was lost.
"""

from collections.abc import Sequence

from infinilora.engine.lora.interface import LoraBackend, StepLost, StepPlan
from infinilora.engine.model.cut import HEAD_SITES
from infinilora.engine.model.decoder import Decoder, Flow
from infinilora.engine.model.deltas import CarriedDeltas
from infinilora.protocol.adapter import Site


def run_halves(
    decoder: Decoder, halves: Sequence[Flow], lora: LoraBackend, plans: Sequence[StepPlan | None]
) -> list[StepLost | None]:
    """Run all layers of both; what each has lost."""
    deltas = [CarriedDeltas(lora, plan, _stops) for plan in plans]
    decoder.run_in_turns(halves, deltas)
    return [of.loss for of in deltas]


def _stops(_layer: int, site: Site) -> bool:
    """At every site that all shards compute."""
    return site not in HEAD_SITES
