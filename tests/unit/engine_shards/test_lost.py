"""A delta lost on any shard, in the middle of a step: all agree, its rows run again whole, nobody waits for ever."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.lora.interface import LeaseStatus, LeaseView, LoraBackend, StepLost, Ticket
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from support.engine_shards import sharded
from support.engines import TestEngine
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.shard_pools import LIMITS, Pools, error_of, prompt
from support.tiny_models import make_tiny_model


class Losing:
    """A back-end that loses what it adds, or is asked for, for the `at`-th time; `verify`: and says so at the end."""

    def __init__(self, inner: LoraBackend, at: int, when: str) -> None:
        self._inner = inner
        self._left = at
        self._when = when
        self._owes = False
        self.digests: frozenset[Digest] = frozenset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, *call: Any) -> Ticket | None:
        ticket = self._inner.submit(*call)
        if self._when == "submit" and ticket is not None:
            self._count()
        return ticket

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        if self._when == "add" and ticket is not None and self._left == 1:
            y.fill_(float("nan"))
        if self._when == "add" and ticket is not None:
            self._count()
        if self._when == "verify" and ticket is not None:
            self._left -= 1
            if self._left == 0:
                self._owes = True
                return
        self._inner.add(ticket, y)

    def verify(self) -> None:
        owed, self._owes = self._owes, False
        if owed:
            raise StepLost(self.digests, "as the test wants it, late")
        self._inner.verify()

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise StepLost(self.digests, "as the test wants it")


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("when", ["submit", "add", "verify"])
@pytest.mark.parametrize("at", [1, 2, 7, 9])
@pytest.mark.parametrize("shard", [0, 1])
def test_rows_whose_delta_one_shard_lost_are_run_again_on_all(
    shard: int, at: int, when: str, tmp_path: Path, *, halves: bool
) -> None:
    tiny = make_tiny_model("qwen2_moe", tmp_path / "model")
    targets = (*ATTENTION, *MLP, "gate")
    adapters = [
        write_adapter(tmp_path / f"a{i}", tiny.directory, rank=3, targets=targets, seed=i, std=0.25) for i in (0, 1)
    ]
    pools, losing = Pools(tmp_path), list[Losing]()

    def lora_of(model: LoadedModel, ring: Callable[[], None]) -> LoraBackend:
        own = pools.lora_of(model, ring)
        if model.decoder.shards.cut.shard != shard:
            return own
        losing.append(Losing(own, at, when))
        return losing[0]

    with sharded(tiny.directory, 2, lora_of) as house:
        digests = [pools.add(adapter, house.model.card) for adapter in adapters]
        losing[0].digests = frozenset(digests[:1])
        engine = TestEngine(house.model, house.lora, limits=LIMITS, halves=halves)
        options: dict[str, Any] = {"max_tokens": 3, "logprobs": 0, "prompt_logprobs": 0}
        heard = [engine.ask(prompt(8 + i), digest=digest, **options) for i, digest in enumerate(digests)]
        base = engine.ask(prompt(5), **options)
        house.finish(engine)
        house.lora.close()
    pools.close()

    assert losing[0]._left <= 0
    oracle = Oracle(tiny.directory)
    assert error_of(base, prompt(5), oracle) < 1e-4
    for i, (told, adapter) in enumerate(zip(heard, adapters, strict=True)):
        assert len(told.tokens) == 3
        assert error_of(told, prompt(8 + i), oracle, adapter) < 1e-4


class Refusing:
    """A back-end that has no adapter, and says so."""

    def __init__(self, inner: LoraBackend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def view(self, digest: Digest) -> LeaseView:
        return LeaseView(LeaseStatus.FAILED, error=AdapterFailed(f"no room for {digest} here"))


def test_an_adapter_that_one_shard_cannot_have_is_refused_in_its_words(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama", tmp_path / "model")
    adapter = write_adapter(tmp_path / "a", tiny.directory, rank=3, targets=("q_proj",), seed=1)
    pools = Pools(tmp_path)

    def lora_of(model: LoadedModel, ring: Callable[[], None]) -> LoraBackend:
        own = pools.lora_of(model, ring)
        return own if model.decoder.shards.cut.is_head else Refusing(own)

    with sharded(tiny.directory, 2, lora_of) as house:
        digest = pools.add(adapter, house.model.card)
        engine = TestEngine(house.model, house.lora, limits=LIMITS)
        heard = engine.ask(prompt(8), digest=digest, max_tokens=3)
        house.finish(engine)
        house.lora.close()
    pools.close()
    assert heard.failed.error.code == "adapter_failed"
    assert "no room for" in heard.failed.error.message
