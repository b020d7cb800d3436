"""What a rank-space split of expert LoRA would move, and when it would pay (decision 0007). Pure arithmetic.

                     engine            wire               LoRA server
    whole rows       -                 x, act; 2f, h      both factors of each module
    split            Bt gate, up;      x, v; v, h         A of gate and up, B of down
                     A of down

So all that is as wide as an expert stays in the engine, which reads a factor of each for it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's experts. `width` is of the model, `expert_width` of one expert; a token chooses `topk`."""

    width: int
    expert_width: int
    num_experts: int
    topk: int


@dataclass(frozen=True, slots=True)
class Step:
    """The adapter rows of one step, dealt evenly to `adapters`, all of one rank. Numbers take `num_bytes`."""

    rows: int
    adapters: int
    rank: int
    num_bytes: int = 2


def wire_bytes(experts: Experts, inner: int, num_bytes: int = 2) -> int:
    """A token's at one layer, both ways: x out and gate, up back; act out and down back. `inner`: what f becomes."""
    return num_bytes * (2 * experts.width + 3 * experts.topk * inner)


def pairs(experts: Experts, step: Step) -> float:
    """How many (adapter, expert) are expected in the step, where each token chooses as by lot."""
    passed_over: float = (1 - experts.topk / experts.num_experts) ** (step.rows / step.adapters)
    return step.adapters * experts.num_experts * (1 - passed_over)


def saved_bytes(experts: Experts, step: Step) -> int:
    """On the wire, by a split, at one layer of one step. Below 0 where the rank is more than the experts' width."""
    f = experts.expert_width
    whole, split = (wire_bytes(experts, inner, step.num_bytes) for inner in (f, step.rank))
    return step.rows * (whole - split)


def added_bytes(experts: Experts, step: Step) -> float:
    """That the engine then reads from its memory, on its critical path: three factors [rank, f] for each pair."""
    return pairs(experts, step) * 3 * experts.expert_width * step.rank * step.num_bytes


def kept_share(experts: Experts) -> float:
    """Of each adapter, what the engine would hold: all factors that are as wide as an expert."""
    return experts.expert_width / (experts.expert_width + experts.width)


def break_even(experts: Experts, step: Step) -> float:
    """The link's bandwidth over the engine's memory bandwidth, below which a split saves time."""
    return saved_bytes(experts, step) / added_bytes(experts, step)
