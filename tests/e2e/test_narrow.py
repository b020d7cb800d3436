"""A system whose links narrow says so in every answer of an adapter, and in none of the base."""

from pathlib import Path

import pytest

from support.oracle import ATTENTION, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


async def test_answers_over_narrow_links_say_so_and_those_of_the_base_do_not(
    stacks: StackFactory, tmp_path: Path
) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    adapter = write_adapter(tmp_path / "a", checkpoint, rank=8, targets=ATTENTION, seed=1, std=0.05)
    # Of the two, rdma has no library here: what is told shows that tcp was taken in its place.
    env = {"INFINILORA_LINK_NARROWING": "always", "INFINILORA_LINK_BACKENDS": "rdma,tcp"}
    api = await stacks.start(checkpoint, env=env)
    await api.register("a", adapter)
    told = {}
    for model in ("a", "tiny"):
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 3}
        answer = await api.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        told[model] = answer.headers.get("x-infinilora-narrow"), answer.json()["usage"].get("narrow")
    assert told == {"a": ("int8", "int8"), "tiny": (None, None)}
