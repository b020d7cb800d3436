import pytest
import torch

from infinilora.engine.lora.interface import AdapterRows, Lease, LeaseStatus
from infinilora.engine.lora.none import NoLora
from infinilora.protocol.errors import AdapterNotFound, Internal
from infinilora.protocol.ids import Digest

D = Digest("sha256:d")


def test_every_adapter_is_refused_in_words_that_say_what_to_do() -> None:
    lora = NoLora()
    lora.want(D)
    view = lora.view(D)
    assert view.status is LeaseStatus.FAILED
    assert isinstance(view.error, AdapterNotFound)
    assert "INFINILORA_LORA=none" in view.error.message
    lora.drop(D)
    lora.check()


def test_a_holder_that_was_never_dropped_is_seen() -> None:
    lora = NoLora()
    lora.want(D)
    with pytest.raises(AssertionError, match="still held"):
        lora.check()


def test_a_base_step_has_no_plan_and_an_adapter_step_is_a_fault() -> None:
    lora = NoLora()
    assert lora.begin([]) is None
    with pytest.raises(Internal):
        lora.begin([AdapterRows(0, 1, Lease(D, "g", 0, 0, (1,)))])
    y = torch.ones(2, 2)
    lora.add(None, y)
    assert torch.equal(y, torch.ones(2, 2))
