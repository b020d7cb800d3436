"""Class D, memory: what is counted at the start holds the worst case, and running out of it ends one request."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from infinilora.cli.stack import Urls
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import Unavailable
from infinilora.weights.synth import write_peft_adapter
from support.api import Api
from support.cases import Files, config, keyed, modules
from support.hangs import NO_MEMORY, Hangs
from support.stacks import StackFactory
from support.worlds import World, error_of, on

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32768,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
NUM_SLOTS, MAX_RANK, RUNNING, NEW_TOKENS = 8, 64, 16, 8
TOKEN_BYTES = 2 * 4 * 128 * 4  # keys and values, four layers, 128 numbers of four bytes
ENV = {
    "LOAD_FORMAT": "dummy",
    "NUM_SLOTS": NUM_SLOTS,
    "POOL_SLOTS": NUM_SLOTS,
    "POOL_BYTES": 48 << 20,
    "MAX_RUNNING": RUNNING,
    "STEP_TOKENS": 256,
    "KV_BYTES": RUNNING * 1024 * TOKEN_BYTES,
}


@pytest_asyncio.fixture(loop_scope="session")
async def stacks(tmp_path: Path) -> AsyncIterator[StackFactory]:
    factory = StackFactory(tmp_path)
    yield factory
    await factory.stop()


async def started(stacks: StackFactory, backend: str, **more: int) -> Api:
    """A system whose every limit is set, of a model that is large enough to be counted."""
    model = stacks.root / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    env = {f"INFINILORA_{key}": str(value) for key, value in (ENV | more).items()}
    return await stacks.start(model, backend=backend, env=env, urls=Urls(store=f"file://{stacks.root / 'store'}"))


class Peak:
    """The most memory of its own that a process holds inside `with`."""

    def __init__(self, pid: int | None) -> None:
        self.num_bytes = 0
        self._status = Path(f"/proc/{pid}/status")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            held = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
            now = sum(int(held[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
            self.num_bytes = max(self.num_bytes, now)


def counted(stacks: StackFactory, name: str) -> dict[str, Any]:
    """What a service said of its memory when it started last."""
    lines = [json.loads(line) for line in stacks.stack.log(name).read_text().splitlines() if line.startswith("{")]
    found: dict[str, Any] = [line for line in lines if line["message"] == "memory counted"][-1]
    return found


async def register(stacks: StackFactory, api: Api) -> list[str]:
    """As many adapters of the largest rank as there are slots."""
    (path,) = (stacks.root / "store").rglob("card.json")
    card = msgspec.json.decode(path.read_bytes(), type=BaseCard)
    names = [f"d10-{number}" for number in range(NUM_SLOTS)]
    for seed, name in enumerate(names):
        source = write_peft_adapter(stacks.root / "sources" / name, card, rank=MAX_RANK, seed=seed)
        await api.register(name, source, patience_s=60)
    return names


async def longest(api: Api, name: str, seed: int) -> None:
    """The longest prompt there is, scored, with a token choice that looks at the whole vocabulary."""
    prompt = [(seed + 7 * at) % 30000 + 3 for at in range(1024 - NEW_TOKENS)]
    body = {"model": name, "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": seed}
    answer = await api.http.post(
        "/v1/completions", json=body | {"temperature": 2.0, "top_p": 0.9999, "logprobs": 5}, timeout=200
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == NEW_TOKENS


@pytest.mark.parametrize("backend", ["local", "shm"])
async def test_d10_the_worst_case_is_within_what_was_counted(stacks: StackFactory, backend: str) -> None:
    api = await started(stacks, backend)
    names = await register(stacks, api)
    services = ["engine"] if backend == "local" else ["engine", "lora-server"]
    before = stacks.stack.pids()
    peaks = [Peak(before[service]) for service in services]
    for peak in peaks:
        peak.__enter__()
    try:
        await asyncio.gather(*(longest(api, names[n % NUM_SLOTS], n) for n in range(2 * RUNNING)))
    finally:
        for peak in peaks:
            peak.__exit__()
    assert stacks.stack.pids() == before
    for service, peak in zip(services, peaks, strict=True):
        told = counted(stacks, service)
        assert 0 < peak.num_bytes <= told["limit_bytes"] - told["left_bytes"], (service, peak.num_bytes, told)


async def test_d10_a_sum_that_does_not_fit_ends_the_start_and_says_each_term(stacks: StackFactory) -> None:
    with pytest.raises(Unavailable, match="keeps dying at start") as refused:
        await started(stacks, "local", MEMORY_BYTES=300 << 20)
    for words in (
        "not enough memory: INFINILORA_MEMORY_BYTES is 314,572,800 bytes",
        f"{48 << 20:,} adapters in the pool (less by INFINILORA_POOL_BYTES)",
        f"{RUNNING * 1024 * TOKEN_BYTES:,} keys and values (less by INFINILORA_KV_BYTES",
    ):
        assert words in str(refused.value)


@pytest.mark.parametrize("service", ["engine", "lora-server"])
@on("L/hang")
async def test_d10_an_allocation_that_fails_ends_one_request_at_most(running: World, service: str) -> None:
    loras = running.oracle.loras(modules("q_proj", "v_proj"), seed=100)
    changes = running.oracle.merge(loras, 2.0)
    await running.register(Files(config(), keyed(loras)), name=f"d10-{service}")
    await running.serves(f"d10-{service}", changes)
    before, hangs = running.factory.stack.pids(), Hangs(running.root / "hangs")
    hangs.order(service, NO_MEMORY)
    asked = [running.serves(f"d10-{service}", changes) for _ in range(8)] + [running.serves("tiny")]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(refused) <= 1, refused
    for error in refused:
        assert isinstance(error, httpx.HTTPStatusError), error
        assert error_of(error.response, [503])["code"] == "overloaded"
    assert hangs.is_taken(service)
    logs = [running.factory.stack.log(name).read_text() for name in running.factory.stack.names()]
    assert any("no memory for a" in log for log in logs)
    await asyncio.gather(running.serves(f"d10-{service}", changes), running.serves("tiny"))
    assert running.factory.stack.pids() == before
