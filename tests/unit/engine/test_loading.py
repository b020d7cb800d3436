"""Rows whose adapter still loads: through the model as the layers come, never in a step with others, never wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.job import Patience
from infinilora.engine.lora.interface import LeaseStatus
from infinilora.engine.sched.scheduler import Limits
from infinilora.protocol.errors import AdapterFailed, AdapterLoading
from infinilora.protocol.ids import Digest
from support.engines import Heard, TestEngine
from support.oracle import ATTENTION, MLP, Oracle
from support.plain_lora import PlainLora

LIMITS = Limits(max_running=8, step_tokens=16)
PROMPT = [5, 9, 33, 70, 12, 8]
SHORTFALL = 2e-3

Loaded = Callable[[str], LoadedModel]
MakeAdapter = Callable[..., Path]


class House:
    """An engine with one adapter that loads, by hand, and one that is resident."""

    def __init__(self, model: LoadedModel, cold: Path, warm: Path, *, patience: Patience | None = None) -> None:
        self.lora = PlainLora(model.card)
        self.engine = TestEngine(model, self.lora, limits=LIMITS, patience=patience)
        self.cold, self.warm = self.lora.register(cold), self.lora.register(warm)
        self.files = {self.cold: cold, self.warm: warm}
        self.ready(1)

    def ready(self, layers: int) -> None:
        self.lora.status[self.cold] = LeaseStatus.ADMISSIBLE
        self.lora.layers_ready[self.cold] = layers

    def resident(self) -> None:
        self.lora.status[self.cold] = LeaseStatus.RESIDENT

    def ask(self, digest: Digest, tokens: int = 4) -> Heard:
        return self.engine.ask(PROMPT, digest=digest, max_tokens=tokens)

    def shortfall(self, oracle: Oracle, heard: Heard, digest: Digest) -> float:
        return oracle.shortfall(PROMPT, heard.tokens, self.files[digest])


@pytest.fixture
def house(loaded: Loaded, adapter: MakeAdapter) -> House:
    return House(loaded("llama"), adapter("llama", 8, ATTENTION, 31), adapter("llama", 4, MLP, 32))


def test_rows_go_as_far_as_the_layers_are_there_and_are_right(house: House, oracle: Callable[[str], Oracle]) -> None:
    cold = house.ask(house.cold)
    assert house.engine.turn()
    begun = house.lora.submits
    assert begun > 0, "layer 0 was computed while the others were missing"
    assert not house.engine.turn(), "a parked pass has nothing to do until a layer comes"
    house.ready(house.lora.num_layers)
    assert house.engine.turn()
    assert house.lora.submits > begun
    assert cold.tokens == [], "the layers are there, but lm_head, which comes after them, is not"
    house.resident()
    house.engine.turn()
    assert len(cold.tokens) == 1
    house.engine.run()
    assert house.shortfall(oracle("llama"), cold, house.cold) < SHORTFALL
    assert house.shortfall(oracle("llama"), cold, house.warm) > 100 * SHORTFALL


def test_a_row_that_is_parked_delays_no_row_of_a_resident_adapter(
    house: House, oracle: Callable[[str], Oracle]
) -> None:
    cold, warm = house.ask(house.cold), house.ask(house.warm, tokens=8)
    for step in range(1, 6):
        assert house.engine.turn()
        assert len(warm.tokens) == step
    house.resident()
    house.engine.run()
    assert house.shortfall(oracle("llama"), warm, house.warm) < SHORTFALL
    assert house.shortfall(oracle("llama"), cold, house.cold) < SHORTFALL


def test_deltas_of_a_parked_pass_that_did_not_come_are_its_own_loss_and_nobody_elses(
    house: House, oracle: Callable[[str], Oracle]
) -> None:
    """Told by `verify` as the pass is parked, before a step of others asks."""
    cold, warm = house.ask(house.cold), house.ask(house.warm, tokens=8)
    house.lora.lose_late[house.cold] = 1
    for step in range(1, 4):
        assert house.engine.turn()
        assert len(warm.tokens) == step
    house.resident()
    house.engine.run()
    assert house.shortfall(oracle("llama"), cold, house.cold) < SHORTFALL
    assert house.shortfall(oracle("llama"), warm, house.warm) < SHORTFALL


def test_a_client_that_leaves_while_its_rows_are_parked_leaves_nothing_behind(
    house: House, oracle: Callable[[str], Oracle]
) -> None:
    gone, stays = house.ask(house.cold), house.ask(house.cold)
    house.engine.turn()
    assert gone.job is not None
    house.engine.loop.abort(gone.job)
    house.engine.turn()
    house.resident()
    house.engine.run()
    assert gone.ended.reason == "abort"
    assert house.shortfall(oracle("llama"), stays, house.cold) < SHORTFALL


def test_rows_whose_tenancy_ends_while_they_are_parked_are_run_again_whole(
    house: House, oracle: Callable[[str], Oracle]
) -> None:
    cold = house.ask(house.cold)
    house.engine.turn()
    house.lora.restage(house.cold, layers_ready=2)
    house.engine.turn()
    assert cold.job is not None
    assert cold.job.times_lost == 1
    house.resident()
    house.engine.run()
    assert house.shortfall(oracle("llama"), cold, house.cold) < SHORTFALL


def test_deltas_that_are_lost_in_a_pass_are_run_again_whole(house: House, oracle: Callable[[str], Oracle]) -> None:
    house.lora.lose[house.cold] = 1
    cold = house.ask(house.cold)
    house.engine.turn()
    house.resident()
    house.engine.run()
    assert house.shortfall(oracle("llama"), cold, house.cold) < SHORTFALL


def test_an_adapter_that_fails_while_its_rows_are_parked_fails_them_alone(house: House) -> None:
    cold, warm = house.ask(house.cold), house.ask(house.warm)
    house.engine.turn()
    house.lora.status[house.cold] = LeaseStatus.FAILED
    house.engine.run()
    assert isinstance(cold.failed.error, AdapterFailed)
    assert len(warm.tokens) == 4


def test_parked_rows_have_the_patience_of_loading_and_not_of_a_loss(loaded: Loaded, adapter: MakeAdapter) -> None:
    files = adapter("llama", 8, ATTENTION, 31), adapter("llama", 4, MLP, 32)
    patient = House(loaded("llama"), *files, patience=Patience(loading_s=30.0, lost_s=0.0))
    cold = patient.ask(patient.cold)
    for _ in range(3):
        patient.engine.turn()
    assert not cold.is_over
    patient.resident()
    patient.engine.run()
    assert len(cold.tokens) == 4

    hasty = House(loaded("llama"), *files, patience=Patience(loading_s=0.0, lost_s=30.0))
    cold = hasty.ask(hasty.cold)
    hasty.engine.run()
    assert isinstance(cold.failed.error, AdapterLoading)
