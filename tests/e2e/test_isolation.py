"""Laws 1 and 5 through the whole system: adapters do not touch base traffic, nor one another."""

import asyncio
from pathlib import Path

import pytest

from support.api import Api
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MIXED_BOUND = 1e-4
PROMPT = [5, 77, 12, 3, 99, 41, 8, 120, 64, 2, 31, 55]


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


async def score(api: Api, model: str) -> list[float]:
    return (await api.score(model, PROMPT)).prompt_logprobs


async def test_base_is_untouched_and_a_wrong_adapter_would_show(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    oracle = Oracle(checkpoint)
    a, b = (
        write_adapter(tmp_path / n, checkpoint, rank=8, targets=ATTENTION + MLP, seed=s, std=0.2)
        for s, n in enumerate("ab")
    )
    api = await stacks.start(checkpoint)
    before = await score(api, "tiny")
    await api.register("a", a)
    await api.register("b", b)
    served = {name: await score(api, name) for name in ("a", "b")}

    assert await score(api, "tiny") == before, "base alone is bit-identical once adapters are there"
    for _ in range(4):
        rows = await asyncio.gather(*(score(api, m) for m in ("tiny", "a", "b", "tiny", "b", "a")))
        for model, row in zip(("tiny", "a", "b", "tiny", "b", "a"), rows, strict=True):
            assert difference(row, served.get(model, before)) <= MIXED_BOUND
    wrong = difference(served["a"], oracle.logprobs(PROMPT, b))
    assert wrong > 100 * MIXED_BOUND, "this test could not see a wrong adapter"


async def test_a_replaced_adapter_never_reuses_the_old_ones_cache(stacks: StackFactory, tmp_path: Path) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    oracle = Oracle(checkpoint)
    old, new = (
        write_adapter(tmp_path / n, checkpoint, rank=8, targets=ATTENTION, seed=s, std=0.3)
        for s, n in enumerate(("old", "new"))
    )
    prompt = PROMPT * 6
    api = await stacks.start(checkpoint)
    first = await api.register("a", old)
    produced = await api.generate("a", prompt, max_tokens=8)
    assert oracle.shortfall(prompt, produced, old) <= 2e-3
    second = await api.register("a", new, replace=True)
    assert first["digest"] != second["digest"]
    produced = await api.generate("a", prompt, max_tokens=8)
    assert oracle.shortfall(prompt, produced, new) <= 2e-3
    produced = await api.generate("tiny", prompt, max_tokens=8)
    assert oracle.shortfall(prompt, produced) <= 2e-3
