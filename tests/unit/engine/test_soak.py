"""Everything at once, seeded: adapters that come and go, lost steps, preemption, aborts, shared prefixes.

Each token that any client was told is checked against the oracle under that client's own adapter.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from infinilora.engine.lora.interface import LeaseStatus
from infinilora.engine.sched.scheduler import Limits
from infinilora.protocol.ids import Digest
from support.engines import Heard, TestEngine, load_tiny
from support.oracle import ATTENTION, MLP, Oracle
from support.plain_lora import PlainLora
from support.tiny_models import TinyModel

SHORTFALL = 2e-3


@dataclass
class Client:
    prompt: list[int]
    adapter: Path | None
    heard: Heard
    aborted: bool = False


def trouble(dice: random.Random, engine: TestEngine, lora: PlainLora, digests: list[Digest]) -> None:
    """Between two rounds: a lease moves, or deltas are lost."""
    digest = dice.choice(digests)
    match dice.randrange(8):
        case 0:
            lora.status[digest] = LeaseStatus.WAITING
        case 1 | 2:
            lora.status[digest] = LeaseStatus.RESIDENT
        case 3:
            lora.lose[digest] = 1 if lora.holders[digest] else 0
        case 4 | 5:
            load_some(dice, lora, digest)
        case _:
            engine.loop.wake()


def load_some(dice: random.Random, lora: PlainLora, digest: Digest) -> None:
    """An adapter begins to load, or gets some more layers."""
    if lora.status[digest] is LeaseStatus.ADMISSIBLE:
        lora.layers_ready[digest] = min(lora.layers_ready[digest] + dice.randrange(1, 3), lora.num_layers)
    else:
        lora.status[digest], lora.layers_ready[digest] = LeaseStatus.ADMISSIBLE, 1


def soak(seed: int, num_clients: int, model: TinyModel, adapters: list[Path]) -> list[Client]:
    dice = random.Random(seed)
    loaded = load_tiny(model.directory, kv_bytes=18 * 1024, max_model_len=64)
    lora = PlainLora(loaded.card)
    digests = [lora.register(path) for path in adapters]
    by_path: dict[Path | None, Digest | None] = {None: None, **dict(zip(adapters, digests, strict=True))}
    engine = TestEngine(loaded, lora, limits=Limits(max_running=6, step_tokens=11, max_bypass=8))
    stem = [dice.randrange(3, 120) for _ in range(24)]
    clients: list[Client] = []
    while len(clients) < num_clients or engine.loop._jobs:
        if len(clients) < num_clients and dice.random() < 0.4:
            path = dice.choice([None, *adapters])
            tail = [dice.randrange(3, 120) for _ in range(dice.randrange(1, 10))]
            prompt = stem[: dice.randrange(0, 24)] + tail
            heard = engine.ask(prompt, digest=by_path[path], max_tokens=dice.randrange(1, 20))
            clients.append(Client(prompt, path, heard))
        if len(clients) < num_clients:
            trouble(dice, engine, lora, digests)
        else:
            lora.status.update(dict.fromkeys(digests, LeaseStatus.RESIDENT))
        if clients and dice.random() < 0.05:
            client = dice.choice(clients)
            assert client.heard.job is not None
            client.aborted = True
            engine.loop.abort(client.heard.job)
        engine.turn()
    engine.loop.check_idle()
    return clients


@pytest.fixture
def adapters(adapter: Callable[..., Path]) -> list[Path]:
    return [adapter("llama", 4, ATTENTION, 41), adapter("llama", 16, MLP, 42), adapter("llama", 8, ATTENTION, 43)]


@pytest.mark.parametrize("seed", [1, 2])
def test_no_client_is_ever_told_a_token_of_another_adapter(
    seed: int, tiny: Callable[[str], TinyModel], oracle: Callable[[str], Oracle], adapters: list[Path]
) -> None:
    clients = soak(seed, 60, tiny("llama"), adapters)

    assert sum(c.heard.ended.num_preemptions > 0 for c in clients) > 2
    assert sum(c.heard.ended.cached_tokens > 0 for c in clients) > 3
    assert sum(c.aborted for c in clients) > 3
    check(clients, oracle("llama"), adapters)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_no_client_of_thousands_is_told_a_wrong_token(
    seed: int, tiny: Callable[[str], TinyModel], oracle: Callable[[str], Oracle], adapters: list[Path]
) -> None:
    check(soak(seed, 200, tiny("llama"), adapters), oracle("llama"), adapters)


def check(clients: list[Client], oracle: Oracle, adapters: list[Path]) -> None:
    """Right under the client's own adapter, and (mostly) visibly wrong under any other."""
    told_apart = 0
    for client in clients:
        if not client.heard.tokens:
            assert client.aborted
            continue
        assert client.aborted or client.heard.ended.reason == "length"
        assert oracle.shortfall(client.prompt, client.heard.tokens, client.adapter) < SHORTFALL
        for other in {None, *adapters} - {client.adapter}:
            told_apart += oracle.shortfall(client.prompt, client.heard.tokens, other) > 100 * SHORTFALL
    assert told_apart > 2 * len(clients)
