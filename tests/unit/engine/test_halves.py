"""Steps whose rows go in two halves that take turns: the same tokens and numbers, and one computes while one waits."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typing_extensions import override

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.lora.interface import Routing
from infinilora.engine.sched.scheduler import Limits
from infinilora.protocol.adapter import Site
from infinilora.protocol.ids import Digest
from support.engines import Heard, TestEngine
from support.oracle import ATTENTION, MLP, Oracle
from support.plain_lora import PlainLora, PlainPlan, PlainTicket
from support.tiny_models import VOCAB

TOLERANCE = 1e-4
EXPERTS = {"mixtral": ("w1", "w2", "w3"), "qwen2_moe": MLP, "qwen3_moe": MLP}


class Told(PlainLora):
    """Notes what is submitted and added, in order: S or A, and the rows of the plan that it was for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[tuple[str, Site, int]] = []

    @override
    def submit(
        self, plan: PlainPlan, layer: int, site: Site, x: Tensor, routing: Routing | None = None
    ) -> PlainTicket | None:
        ticket = super().submit(plan, layer, site, x, routing)
        if ticket is not None:
            self.told.append(("S", site, plan.num_rows))
        return ticket

    @override
    def add(self, ticket: PlainTicket | None, y: Tensor) -> None:
        if ticket is not None:
            self.told.append(("A", ticket.site, len(ticket.delta)))
        super().add(ticket, y)


def prompts() -> list[list[int]]:
    return [[(7 * i + 3 * n) % (VOCAB - 3) + 3 for i in range(length)] for n, length in enumerate((4, 19, 9, 1, 6))]


def run(
    model: LoadedModel, lora: PlainLora, digests: list[Digest | None], *, halves: bool, tokens: int = 6
) -> list[Heard]:
    engine = TestEngine(model, lora, limits=Limits(max_running=8, step_tokens=16), halves=halves)
    heard = [
        engine.ask(ids, digest=digest, max_tokens=tokens, logprobs=1, prompt_logprobs=1)
        for ids, digest in zip(prompts(), digests, strict=True)
    ]
    engine.run()
    return heard


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_halves_give_the_numbers_of_whole_steps_and_of_the_oracle(
    name: str,
    loaded: Callable[[str], LoadedModel],
    oracle: Callable[[str], Oracle],
    adapter: Callable[..., Path],
) -> None:
    mlp = EXPERTS.get(name, MLP)
    files = [adapter(name, 4, ATTENTION, 71), adapter(name, 3, mlp, 72), adapter(name, 8, (*ATTENTION, *mlp), 73)]
    told = {}
    for halves in (False, True):
        lora = PlainLora(loaded(name).card)
        digests = [lora.register(file) for file in files]
        told[halves] = run(loaded(name), lora, [digests[0], digests[1], None, digests[2], None], halves=halves)
        assert lora.open_plans == 0
    for ids, file, whole, half in zip(
        prompts(), [files[0], files[1], None, files[2], None], told[False], told[True], strict=True
    ):
        assert half.tokens == whole.tokens
        for a, b in zip((*whole.prompt_scores, *whole.scores), (*half.prompt_scores, *half.scores), strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=5e-5)
        assert oracle(name).shortfall(ids, half.tokens, file) < TOLERANCE
        if file is not None:
            assert oracle(name).shortfall(ids, half.tokens) > TOLERANCE, "the base would be seen"


def test_each_half_computes_while_the_other_waits(
    loaded: Callable[[str], LoadedModel], adapter: Callable[..., Path]
) -> None:
    """Both have submitted a site before either adds it, and the first goes on to the next before the second adds."""
    lora = Told(loaded("llama").card)
    digest = lora.register(adapter("llama", 8, (*ATTENTION, *MLP), 73))
    engine = TestEngine(loaded("llama"), lora, limits=Limits(max_running=8, step_tokens=16), halves=True)
    for ids in ([5, 6, 7], [8, 9]):
        engine.ask(ids, digest=digest, max_tokens=2)
    engine.turn()
    sites = (Site.QKV, Site.O, Site.GATE_UP, Site.DOWN) * loaded("llama").decoder.spec.num_layers
    wanted = [("S", sites[0], 3), ("S", sites[0], 2)]
    for site, following in pairwise(sites):
        wanted += [("A", site, 3), ("S", following, 3), ("A", site, 2), ("S", following, 2)]
    assert lora.told == [*wanted, ("A", sites[-1], 3), ("A", sites[-1], 2)]
    engine.run()


def test_a_step_of_one_sequence_or_of_the_base_alone_is_whole(
    loaded: Callable[[str], LoadedModel], adapter: Callable[..., Path]
) -> None:
    lora = Told(loaded("llama").card)
    digest = lora.register(adapter("llama", 4, ATTENTION, 71))
    engine = TestEngine(loaded("llama"), lora, limits=Limits(max_running=8, step_tokens=16), halves=True)
    engine.ask([5, 6, 7], digest=digest, max_tokens=1)
    engine.run()
    assert [rows for kind, site, rows in lora.told if kind == "S" and site is Site.QKV] == [3, 3]
    lora.told.clear()
    for ids in ([5, 6, 7], [8, 9]):
        engine.ask(ids, max_tokens=2)
    engine.run()
    assert lora.told == []


@pytest.mark.parametrize("lost", [0, 1])
def test_rows_lost_in_one_half_are_run_again_and_the_others_finish(
    lost: int, loaded: Callable[[str], LoadedModel], oracle: Callable[[str], Oracle], adapter: Callable[..., Path]
) -> None:
    files = [adapter("llama", 4, ATTENTION, 71), adapter("llama", 3, MLP, 72), adapter("llama", 8, ATTENTION, 74)]
    lora = PlainLora(loaded("llama").card)
    digests = [lora.register(file) for file in files]
    lora.lose[digests[lost]] = 2
    heard = run(loaded("llama"), lora, [digests[0], digests[1], None, digests[2], None], halves=True)
    assert lora.lose[digests[lost]] == 0
    for ids, file, half in zip(prompts(), [files[0], files[1], None, files[2], None], heard, strict=True):
        assert len(half.tokens) == 6
        assert oracle("llama").shortfall(ids, half.tokens, file) < TOLERANCE
