"""Two engines, two LoRA servers, two coordinators, 24 adapters under a Zipf load: each process is killed in turn.

Clients stream all the while. No token is wrong and no stream is lost, but for those of a gateway that is killed; and
when a group is killed, nobody who streams an adapter that the other group has too waits for longer than RECOVERY_S.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from infinilora.cli.child import Child
from support.api import Api
from support.oracle import ATTENTION, MLP, Oracle, write_adapter
from support.stacks import StackFactory
from support.tiny_models import VOCAB, make_tiny_model
from support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ADAPTERS = 24
ZIPF = 1.2
CLIENTS = 6
NUM_TOKENS = 64
BOUND = 2e-3
"""Of law 9: a logit below the best."""
RECOVERY_S = 3.0
ENGINES, GROUPS, COORDINATORS = ("engine-0", "engine-1"), ("lora-0", "lora-1"), ("coordinator-0", "coordinator-1")
SETTINGS = {"INFINILORA_HOT_RPS": "0.3", "INFINILORA_HEAT_HALF_LIVES_S": "20"}
"""So that what a few clients ask for most is on both groups."""


@dataclass
class Answer:
    """What a client was told: its greedy tokens, and how long it waited for the next one at the most, seconds."""

    model: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    longest_s: float = 0.0


@dataclass
class Clients:
    """Streams one after the other, by popularity; base in between. What breaks ends the test."""

    api: Api
    models: list[str]
    answers: list[Answer] = field(default_factory=list)
    is_over: bool = False
    may_lose: bool = False
    """Whether the gateway is away, whose streams nobody can keep."""

    async def run(self, dice: random.Random) -> None:
        weights = [1 / (place + 1) ** ZIPF for place in range(len(self.models))]
        while not self.is_over:
            model = "tiny" if dice.random() < 0.1 else dice.choices(self.models, weights)[0]
            prompt = [dice.randrange(3, VOCAB) for _ in range(dice.randrange(4, 12))]
            try:
                self.answers.append(await self._ask(Answer(model, prompt)))
            except (httpx.TransportError, httpx.HTTPStatusError):
                if not self.may_lose:
                    raise
                await asyncio.sleep(0.05)

    async def _ask(self, answer: Answer) -> Answer:
        before = time.monotonic()
        async for event in self.api.stream(answer.model, answer.prompt, max_tokens=NUM_TOKENS):
            if "error" in event and self.may_lose:
                raise httpx.RemoteProtocolError(str(event))
            assert "error" not in event, (answer.model, event)
            answer.longest_s = max(answer.longest_s, time.monotonic() - before)
            before = time.monotonic()
            answer.tokens += [t for choice in event["choices"] for t in choice.get("token_ids") or []]
        if len(answer.tokens) < NUM_TOKENS and self.may_lose:
            raise httpx.RemoteProtocolError("the connection ended")
        assert len(answer.tokens) == NUM_TOKENS, "a stream was cut"
        return answer

    async def go_on(self) -> None:
        """Return once as many answers as there are clients were begun and ended from now on."""
        wanted = len(self.answers) + 2 * CLIENTS
        await eventually(lambda: len(self.answers) >= wanted, "clients are answered", 120)

    @contextmanager
    def that_may_lose(self) -> Iterator[None]:
        self.may_lose = True
        yield
        self.may_lose = False


@dataclass
class World:
    stacks: StackFactory
    second: Child
    """The other coordinator."""
    clients: Clients

    async def whole(self) -> None:
        """Everybody is there, alive, and known to both coordinators; one of these leads."""

        def is_whole(fleet: dict[str, Any]) -> bool:
            there: list[str] = [m["id"] for m in fleet["members"] if (m["state"], m["health"]) == ("ready", "alive")]
            return all(any(one.startswith(name) for one in there) for name in (*ENGINES, *GROUPS))

        for number in range(2):
            await self.fleet_of(number, is_whole)

        async def one_leads() -> bool:
            leading = [(await self.fleet_of(number, lambda _: True))["is_leading"] for number in range(2)]
            return leading.count(True) == 1

        await eventually(one_leads, "one of the coordinators leads", 30)

    async def fleet_of(self, coordinator: int, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return await self.stacks.coordinators[coordinator].wait("/v1/fleet", condition, within_s=90)

    async def replicated(self) -> frozenset[str]:
        """Digests that both groups have; there are some, once this returns."""

        def on_both(fleet: dict[str, Any]) -> frozenset[str]:
            groups = [m for m in fleet["members"] if m["kind"] == "lora-server" and m["health"] == "alive"]
            held = [frozenset[str](m["load"]["resident"]) for m in groups]
            return held[0] & held[1] if len(held) == len(GROUPS) else frozenset()

        return on_both(await self.fleet_of(0, lambda fleet: bool(on_both(fleet))))

    async def strike(self, name: str) -> None:
        """Kill a process and wait until it is back and clients have been answered since."""
        stack = self.stacks.stack
        pid = self.second.pid if name == COORDINATORS[1] else stack.pid(name)
        if name == COORDINATORS[1]:
            self.second.kill()
        else:
            stack.kill(name)

        def is_another() -> bool:
            now = self.second.pid if name == COORDINATORS[1] else stack.pid(name)
            return now is not None and now != pid

        await eventually(is_another, f"{name} is started again", 30)
        await (self.second.until_ready() if name == COORDINATORS[1] else stack.until_ready(name))
        await self.whole()
        await self.clients.go_on()


SOAK = pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])


@pytest.mark.parametrize("rounds", [2, SOAK])
async def test_whatever_is_killed_no_stream_is_lost_and_no_token_is_wrong(
    stacks: StackFactory, tmp_path: Path, rounds: int, record_property: Callable[[str, object], None]
) -> None:
    checkpoint = make_tiny_model("llama-long", tmp_path / "tiny").directory
    oracle = Oracle(checkpoint)
    adapters = {
        f"a{n}": write_adapter(
            tmp_path / f"a{n}", checkpoint, rank=2 + n % 7, targets=(ATTENTION, MLP)[n % 2], seed=n, std=0.3
        )
        for n in range(ADAPTERS)
    }
    api = await stacks.start(checkpoint, engines=2, env=SETTINGS)
    await stacks.stack.set_groups(2)
    world = World(stacks, await stacks.another_coordinator(COORDINATORS[1]), Clients(api, list(adapters)))
    digests = {name: (await api.register(name, directory))["digest"] for name, directory in adapters.items()}
    await world.whole()
    names = [n for n in stacks.stack.names() if n.startswith(("engine", "lora-server", "coordinator"))]
    names.append(COORDINATORS[1])
    assert len(names) == 6
    dice = random.Random(rounds)

    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(world.clients.run(random.Random(f"{rounds} {number}")))
        await world.clients.go_on()
        pauses: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name in dice.sample(names, len(names)):
                is_group = name.startswith("lora-server")
                replicated = await world.replicated() if is_group else frozenset(digests.values())
                before = len(world.clients.answers)
                await world.strike(name)
                since = world.clients.answers[before:]
                waits = [answer.longest_s for answer in since if digests.get(answer.model) in replicated]
                pauses.setdefault(name, []).append(round(max(waits, default=0.0), 2))
                assert not is_group or pauses[name][-1] <= RECOVERY_S, (name, pauses)
            with world.clients.that_may_lose():
                await world.strike("gateway")
        world.clients.is_over = True

    record_property("longest pauses, s", pauses)
    print(f"longest pauses, s: {pauses}; {len(world.clients.answers)} answers")
    of_model: dict[str, list[tuple[list[int], list[int]]]] = {}
    for answer in world.clients.answers:
        of_model.setdefault(answer.model, []).append((answer.prompt, answer.tokens))
    assert len(of_model) > ADAPTERS // 2
    for model, answers in of_model.items():
        assert oracle.worst_shortfall(answers, adapters.get(model)) <= BOUND, model
    assert oracle.worst_shortfall(of_model["a0"]) > BOUND, "what base would have said passes for an adapter's"
