"""One product of all experts computes what a product an expert does, and asks the host for nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.lora.interface import Routing
from infinilora.engine.lora.none import NoLora
from infinilora.engine.model.checkpoint import Checkpoint
from infinilora.engine.model.cut import Cut
from infinilora.engine.model.decoder import Decoder
from infinilora.engine.model.deltas import Deltas, Turns, alone
from infinilora.engine.model.experts import EachExpert, Experts, StackedExperts
from infinilora.engine.model.kv import KvCache
from infinilora.engine.model.moe import moe_block, route
from infinilora.engine.model.ops import Stack, TorchOps, Ungrouped, grouped_product, why_ungrouped
from infinilora.engine.model.shards import Alone
from infinilora.engine.model.spec import MoeSpec, read_spec
from infinilora.engine.model.weights import MoeWeights, load_weights
from infinilora.engine.sched.scheduler import Limits
from infinilora.engine.sizes import Sizes
from infinilora.protocol.adapter import Site
from support.engines import TestEngine
from support.experts import EXPERTS, FF, HIDDEN, SPEC, TOP_K, by_definition, rand, stacked
from support.oracle import ATTENTION, MLP, Oracle
from support.plain_lora import PlainLora
from support.recorder import WAITS, Recorder
from support.tiny_models import TinyModel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

PLACES = {
    "mixed": [[0, 3], [4, 1], [3, 2], [1, 0], [2, 4], [0, 1], [3, 4]],
    "some without a token": [[1, 3], [3, 1], [1, 3]],
    "one token": [[4, 2]],
    "all on one": [[2, 2], [2, 2], [2, 2], [2, 2]],
    "some elsewhere": [[0, 5], [5, 1], [5, 5], [4, 5]],
    "all elsewhere": [[5, 5], [5, 5]],
    "no token": [],
}


def each_of(stack: StackedExperts) -> EachExpert:
    ops = TorchOps(stack.gate_up.weights.device, stack.gate_up.weights.dtype)
    weights = zip(stack.gate_up.weights, stack.down.weights, strict=True)
    return EachExpert([(ops.linear(a), ops.linear(b)) for a, b in weights], HIDDEN, FF, "each")


def places_of(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), TOP_K)


def random_places(seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(1, 20, (), generator=source))
    fewest = int(torch.randint(1, EXPERTS + 1, (), generator=source))
    return torch.randint(0, fewest + 1, (rows, TOP_K), generator=source, dtype=torch.int32)


CASES = [
    *(pytest.param(places_of(rows), id=name) for name, rows in PLACES.items()),
    *(pytest.param(random_places(seed), id=f"random-{seed}") for seed in range(12)),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("places", CASES)
def test_one_product_is_the_definition_and_what_a_product_each_is(places: Tensor, dtype: torch.dtype) -> None:
    experts = stacked(dtype, is_all=False)
    x, act = rand(len(places), HIDDEN, seed=7).to(dtype), rand(places.numel(), FF, seed=8).to(dtype)

    one, each = experts.sort(places), each_of(experts).sort(places)

    per_pair = x.repeat_interleave(TOP_K, 0)
    for found, other, wanted in (
        (one.gate_up(x), each.gate_up(x), by_definition(experts.gate_up.weights, per_pair, places)),
        (one.down(act), each.down(act), by_definition(experts.down.weights, act, places)),
    ):
        assert found.shape == wanted.shape
        assert found.is_contiguous()
        for numbers in (found, other):
            torch.testing.assert_close(numbers.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_weights_of_another_expert_are_seen() -> None:
    experts, places = stacked(torch.float32, is_all=False), places_of(PLACES["mixed"])
    x = rand(len(places), HIDDEN, seed=7)
    wanted = by_definition(experts.gate_up.weights.roll(1, 0), x.repeat_interleave(TOP_K, 0), places)
    assert (experts.sort(places).gate_up(x) - wanted).abs().max() > 0.1


def test_rows_of_no_expert_are_zero_whatever_was_in_memory() -> None:
    def poisoned(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        y = grouped_product(x, weights, ends)
        y[int(ends[-1]) :] = float("nan")
        return y

    whole = stacked(torch.float32, is_all=False)
    experts = StackedExperts(Stack(whole.gate_up.weights, poisoned), Stack(whole.down.weights, poisoned), is_all=False)
    places = places_of(PLACES["some elsewhere"])
    found = experts.sort(places).gate_up(rand(len(places), HIDDEN, seed=7))
    assert found.isfinite().all()
    assert not found[places.flatten() == EXPERTS].any()


def moe_of(experts: Experts, router: Tensor, spec: MoeSpec = SPEC) -> MoeWeights:
    ops = TorchOps(router.device, router.dtype)
    return MoeWeights(spec, ops.linear(router), 0, experts, shared=None, shared_gate=None)


@dataclass
class Noted(Deltas):
    """Says what was asked in which order; its deltas are one number for each site."""

    said: list[str] = field(default_factory=list)
    sent: list[tuple[Tensor, Routing | None]] = field(default_factory=list)

    @override
    def submit(self, layer: int, site: Site, x: Tensor, routing: Routing | None = None) -> None:
        self.said.append(f"submit {site.name}")
        self.sent.append((x.clone(), routing))

    @override
    def add(self, layer: int, site: Site, ticket: object, y: Tensor) -> Turns[None]:
        self.said.append(f"add {site.name}")
        y += 0.25 * (1 + site)
        yield from ()


def run_noted(experts: Experts, x: Tensor, router: Tensor) -> tuple[Noted, Tensor]:
    deltas, ops = Noted(), TorchOps(x.device, x.dtype)
    return deltas, alone(moe_block(0, moe_of(experts, router), x, ops, deltas, Alone()))


def test_a_block_sends_the_same_rows_as_early_and_adds_at_the_same_places() -> None:
    plain = stacked(torch.float32, is_all=True)
    x, router = rand(9, HIDDEN, seed=3), rand(EXPERTS, HIDDEN, seed=4)
    one, found = run_noted(plain, x, router)
    each, wanted = run_noted(each_of(plain), x, router)

    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for (rows, routing), (others, other) in zip(one.sent, each.sent, strict=True):
        torch.testing.assert_close(rows, others, rtol=1e-5, atol=1e-5)
        assert (routing is None) == (other is None)
        if routing is not None and other is not None:
            assert torch.equal(routing.topk_ids, other.topk_ids)
            assert torch.equal(routing.topk_weights, other.topk_weights)

    said: list[str] = []

    def noted(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
            said.append(name)
            return grouped_product(rows, weights, ends)

        return product

    gate_up, down = Stack(plain.gate_up.weights, noted("gate_up")), Stack(plain.down.weights, noted("down"))
    deltas, ops = Noted(said=said), TorchOps(x.device, x.dtype)
    alone(moe_block(0, moe_of(StackedExperts(gate_up, down, is_all=True), router), x, ops, deltas, Alone()))
    assert said == [
        *("submit ROUTER", "add ROUTER"),
        *("submit MOE_GATE_UP", "gate_up", "add MOE_GATE_UP"),
        *("submit MOE_DOWN", "down", "add MOE_DOWN"),
    ]


def test_the_sum_over_experts_is_made_in_fp32_and_rounded_once() -> None:
    experts, dtype = stacked(torch.bfloat16, is_all=True), torch.bfloat16
    x, router = rand(64, HIDDEN, seed=3).to(dtype), rand(EXPERTS, HIDDEN, seed=4).to(dtype)
    moe, ops = moe_of(experts, router), TorchOps(x.device, dtype)
    found = alone(moe_block(0, moe, x, ops, Deltas(NoLora(), None), Alone()))

    routing = route(ops.linear(router)(x), moe)
    pairs = experts.sort(routing.topk_ids)
    down = pairs.down(ops.silu_mul(pairs.gate_up(x))).view(64, TOP_K, HIDDEN)
    wanted = (down.double() * routing.topk_weights.double()[..., None]).sum(1)
    assert (found != wanted.to(dtype)).double().mean() < 0.01


class OneAfterTheOther:
    """Two shards that run in turn: what the head decided is kept for the second."""

    def __init__(self) -> None:
        self.cut = Cut(0, 2)
        self._decided: Tensor | None = None

    def sum(self, partial: Tensor) -> None:
        raise AssertionError("a block sums nothing")

    def share(self, tensor: Tensor) -> None:
        if self._decided is None:
            self._decided = tensor.clone()
        tensor.copy_(self._decided)


def test_the_parts_of_two_shards_sum_to_the_whole() -> None:
    whole, shards = stacked(torch.float32, is_all=True), OneAfterTheOther()
    x, router, ops = (
        rand(9, HIDDEN, seed=3),
        rand(EXPERTS, HIDDEN, seed=4),
        TorchOps(torch.device("cpu"), torch.float32),
    )
    wanted = alone(moe_block(0, moe_of(whole, router), x, ops, Deltas(NoLora(), None), Alone()))

    parts: list[Tensor] = []
    for held in (slice(0, 2), slice(2, EXPERTS)):
        gate_up, down = (Stack(stack.weights[held]) for stack in (whole.gate_up, whole.down))
        experts = StackedExperts(gate_up, down, is_all=False)
        moe = replace(moe_of(experts, router), first_expert=held.start, router=None if parts else ops.linear(router))
        parts.append(alone(moe_block(0, moe, x, ops, Deltas(NoLora(), None), shards)))

    torch.testing.assert_close(parts[0] + parts[1], wanted, rtol=1e-5, atol=1e-5)
    assert min(part.abs().max() for part in parts) > 0.1


TRUE_SHAPES = {
    "qwen3-30b-a3b": (2048, MoeSpec(128, 8, 768, renormalise=True)),
    "mixtral-8x7b": (4096, MoeSpec(8, 2, 14336, renormalise=True)),
}


@pytest.mark.parametrize("held", [1.0, 0.5], ids=["whole", "half"])
@pytest.mark.parametrize("name", TRUE_SHAPES)
def test_a_block_of_true_shapes_asks_for_no_number_at_all(name: str, held: float) -> None:
    """On a device that has shapes and no numbers: whoever waited for one would fail, as would a stride CUDA refuses."""
    hidden, spec = TRUE_SHAPES[name]
    ops, num = TorchOps(torch.device("meta"), torch.bfloat16), int(spec.num_experts * held)
    stacks = ops.stacks(num, (2 * spec.expert_dim, hidden), (hidden, spec.expert_dim))
    assert not isinstance(stacks, Ungrouped)
    router = torch.empty(spec.num_experts, hidden, dtype=ops.dtype, device=ops.device)
    gate_up, down = stacks
    moe = moe_of(StackedExperts(gate_up, down, is_all=held == 1), router, spec)
    x = torch.empty(33, hidden, dtype=ops.dtype, device=ops.device)

    with Recorder() as recorder:
        y = alone(moe_block(0, moe, x, ops, Noted(), Alone()))

    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    asked = [name for name, _ in recorder.asked]
    assert asked.count("_grouped_mm") == 2
    assert not set(asked) & WAITS


def test_a_product_each_waits_for_the_counts() -> None:
    """So that the test above is seen to be able to fail."""
    places = torch.empty(3, TOP_K, dtype=torch.int32, device="meta")
    with pytest.raises(NotImplementedError, match="bincount"):
        each_of(stacked(torch.float32, is_all=False)).sort(places)


@pytest.mark.parametrize("is_all", [True, False])
def test_what_is_asked_of_torch_does_not_depend_on_the_routing(is_all: bool) -> None:
    experts, asked = stacked(torch.float32, is_all=is_all), []
    for name in ("mixed", "all on one"):
        places = places_of((PLACES[name] * 2)[:7])
        x, act = rand(7, HIDDEN, seed=1), rand(7 * TOP_K, FF, seed=2)
        with Recorder() as recorder:
            pairs = experts.sort(places)
            pairs.gate_up(x)
            pairs.down(act)
        asked.append(recorder.asked)
    assert asked[0] == asked[1]
    assert not {name for name, _ in asked[0]} & WAITS


@pytest.mark.parametrize(
    ("dtype", "capability", "in_dims", "why"),
    [
        (torch.bfloat16, (9, 0), [2048, 768], ""),
        (torch.bfloat16, (10, 3), [2048, 768], ""),
        (torch.float32, (9, 0), [2048, 768], "bfloat16"),
        (torch.bfloat16, (8, 0), [2048, 768], "8.0"),
        (torch.bfloat16, (12, 0), [2048, 768], "12.0"),
        (torch.bfloat16, (9, 0), [2048, 764], "764"),
        (torch.float32, None, [2048, 764], ""),
        (torch.float32, None, [5, 4], "5 numbers"),
    ],
)
def test_a_device_without_such_a_product_says_why(
    dtype: torch.dtype, capability: tuple[int, int] | None, in_dims: list[int], why: str
) -> None:
    found = why_ungrouped(dtype, capability, in_dims)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral"])
def test_adapters_of_experts_share_a_step_over_grouped_products(
    name: str,
    tiny: Callable[[str], TinyModel],
    loaded: Callable[[str], LoadedModel],
    oracle: Callable[[str], Oracle],
    adapter: Callable[..., Path],
) -> None:
    directory, ops = tiny(name).directory, TorchOps(torch.device("cpu"), torch.float32)
    spec, plain = read_spec(directory), loaded(name)
    weights = load_weights(spec, Checkpoint(directory, spec), ops, max_len=256)
    assert (weights.experts_how, plain.decoder.weights.experts_how) == ("grouped", "one product each")
    kv = KvCache.allocate(spec, num_blocks=64, block_size=4, device=ops.device, dtype=ops.dtype)
    model = LoadedModel(Decoder(spec, weights, ops, kv), spec, plain.card, Sizes(256, 64, 4, 0), plain.source)
    mlp = ("w1", "w2", "w3") if name == "mixtral" else MLP
    directories = [adapter(name, 4, mlp, 61), adapter(name, 6, (*ATTENTION, *mlp, "gate"), 62), None]
    ids = list(range(5, 18))

    def scores(of: LoadedModel) -> list[list[float]]:
        lora = PlainLora(plain.card)
        engine = TestEngine(of, lora, limits=Limits(max_running=4, step_tokens=16))
        digests = [None if path is None else lora.register(path) for path in directories]
        heard = [engine.ask(ids, digest=digest, max_tokens=4, logprobs=0, prompt_logprobs=0) for digest in digests]
        engine.run()
        for path, told in zip(directories, heard, strict=True):
            assert oracle(name).shortfall(ids, told.tokens, path) < 1e-4
        return [[score.logprob for score in (*told.prompt_scores, *told.scores)] for told in heard]

    found, wanted = torch.tensor(scores(model)), torch.tensor(scores(plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert (wanted[0] - wanted[2]).abs().max() > 0.1
