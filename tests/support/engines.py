"""Drive an engine in the test's own thread: one round after the other, until nothing is left to do."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinilora.engine.assemble import LoadedModel, ModelOptions, load_model, make_loop
from infinilora.engine.events import Ended, Event, Failed, Produced, PromptScored
from infinilora.engine.job import Job, Patience
from infinilora.engine.loop import EngineLoop
from infinilora.engine.sampler import TokenScore
from infinilora.engine.sched.pingpong import PingPong
from infinilora.engine.sched.scheduler import Limits
from infinilora.engine.sequence import SamplingParams, Sequence
from infinilora.protocol.ids import Digest


@dataclass
class Heard:
    """What a client of one sequence was told."""

    job: Job | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [e.token_id for e in self.events if isinstance(e, Produced)]

    @property
    def scores(self) -> list[TokenScore]:
        return [e.score for e in self.events if isinstance(e, Produced) and e.score is not None]

    @property
    def prompt_scores(self) -> tuple[TokenScore, ...]:
        (scored,) = (e.scores for e in self.events if isinstance(e, PromptScored))
        return scored

    @property
    def has_prompt_scores(self) -> bool:
        return any(isinstance(e, PromptScored) for e in self.events)

    @property
    def ended(self) -> Ended:
        last = self.events[-1]
        assert isinstance(last, Ended), last
        return last

    @property
    def failed(self) -> Failed:
        last = self.events[-1]
        assert isinstance(last, Failed), last
        return last

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Ended | Failed)


class TestEngine:
    """An engine without its thread: `ask`, then `run` or `turn`."""

    __test__ = False

    def __init__(
        self, model: LoadedModel, lora: Any, *, limits: Limits, patience: Patience | None = None, halves: bool = False
    ) -> None:
        """`halves`: the rows of every step with adapters take turns."""
        pingpong = PingPong("on" if halves else "off")
        self.loop: EngineLoop = make_loop(model, lora, limits, patience=patience, pingpong=pingpong)

    def ask(
        self,
        prompt: list[int],
        *,
        digest: Digest | None = None,
        produced: list[int] | None = None,
        deadline_s: float | None = None,
        fallback_base: bool = False,
        **params: Any,
    ) -> Heard:
        sequence = Sequence(
            request_id=f"r{len(prompt)}",
            tokens=prompt + (produced or []),
            num_prompt=len(prompt),
            digest=digest,
            params=SamplingParams(**params),
            fallback_base=fallback_base,
        )
        heard = Heard()
        heard.job = self.loop.submit(sequence, heard.events.append, deadline_s=deadline_s)
        return heard

    def turn(self) -> bool:
        busy = self.loop._turn()
        self.loop._scheduler.check()
        return busy

    def run(self, max_turns: int = 5000) -> None:
        """Until everything asked has ended and nothing is held any more."""
        for _ in range(max_turns):
            if not self.turn() and not self.loop._jobs:
                self.loop.check_idle()
                return
        raise AssertionError(f"{len(self.loop._jobs)} sequences did not end in {max_turns} rounds")

    def finish(self, heard: Iterable[Heard], *, within_s: float = 60.0) -> None:
        """Until all of these have ended, where news of leases comes from another thread."""
        deadline = time.monotonic() + within_s
        while not all(one.is_over for one in heard):
            assert time.monotonic() < deadline, "some sequences did not end"
            self.turn_or_yield()

    def turn_or_yield(self) -> None:
        """A round; a moment for other threads if there was nothing to run."""
        if not self.turn():
            time.sleep(0.001)


def load_tiny(directory: Path, **options: Any) -> LoadedModel:
    defaults: dict[str, Any] = {"kv_block": 4, "kv_bytes": 0, "max_model_len": 0}
    return load_model(ModelOptions(directory=directory, **{**defaults, **options}))
