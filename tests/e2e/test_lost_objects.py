"""An adapter whose object and disk copy are gone, on a LoRA server of two slots: who is told what, and for how long."""

import asyncio
from pathlib import Path

import httpx
import pytest

from infinilora.cli.stack import Urls
from support.api import Api
from support.oracle import ATTENTION, write_adapter
from support.stacks import StackFactory
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

HEALTHY = ("b", "c", "d")


def traces(root: Path, digest: str) -> list[Path]:
    """Files of an adapter in the store and in every disk cache."""
    number = digest.removeprefix("sha256:")
    return [path for place in (root / "store", *root.glob("var*")) for path in place.rglob(f"*{number}*")]


async def ask(api: Api, model: str) -> httpx.Response:
    return await api.http.post("/v1/completions", json={"model": model, "prompt": [5, 77, 12], "max_tokens": 2})


@pytest.mark.parametrize("backend", ["shm", "local"])
async def test_a_lost_adapter_fails_alone_and_only_until_it_is_registered_anew(
    stacks: StackFactory, tmp_path: Path, backend: str
) -> None:
    checkpoint = make_tiny_model("llama", tmp_path / "tiny").directory
    sources = {
        name: write_adapter(tmp_path / name, checkpoint, rank=4, targets=ATTENTION, seed=seed, std=0.2)
        for seed, name in enumerate(("a", *HEALTHY))
    }
    slots = {"INFINILORA_NUM_SLOTS": "2", "INFINILORA_POOL_SLOTS": "2"}
    api = await stacks.start(checkpoint, backend=backend, env=slots, urls=Urls(store=f"file://{tmp_path / 'store'}"))
    digests = {name: (await api.register(name, source))["digest"] for name, source in sources.items()}
    for name in ("a", *HEALTHY):  # two slots: the first is out again when the last is in
        assert (await ask(api, name)).status_code == 200
    for replace in ("delete", "keep"):
        assert traces(tmp_path, digests["a"]), "nothing to lose"
        for path in traces(tmp_path, digests["a"]):
            path.unlink()
        lost = {200}
        while lost != {424}:  # it may hold its slot for some rounds
            answers = await asyncio.gather(*(ask(api, name) for name in ("a", *HEALTHY, "a")))
            codes = [answer.status_code for answer in answers]
            assert codes[1:-1] == [200] * len(HEALTHY)
            lost = {codes[0], codes[-1]}
            assert lost <= {200, 424}
        if replace == "delete":
            assert (await api.http.delete("/v1/adapters/a")).status_code == 200
            assert (await ask(api, "a")).status_code == 404
        again = await api.register("a", sources["a"])
        assert again["digest"] == digests["a"]
        assert (await ask(api, "a")).status_code == 200, "it was told of what was before"
