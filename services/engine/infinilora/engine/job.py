"""A sequence and those who wait for it, as the step loop keeps them."""

from dataclasses import dataclass, field

from infinilora.engine.events import Sink
from infinilora.engine.sampler import TokenScore
from infinilora.engine.sequence import Phase, Sequence


@dataclass(slots=True, eq=False)
class Job:
    """Times are seconds of time.perf_counter(). `paused_since`: its adapter is not ready since then."""

    sequence: Sequence
    sink: Sink
    deadline: float | None = None
    paused_since: float | None = None
    first_step_at: float | None = None
    prompt_scores: dict[int, TokenScore] = field(default_factory=dict)
    scores_sent: bool = False
    times_lost: int = 0

    @property
    def lost_adapter(self) -> bool:
        """Whether an adapter that is not ready was so before: the sequence runs, and not on layers that still come."""
        return self.sequence.phase is Phase.RUNNING and not self.sequence.is_parked


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a sequence may go without its adapter: while it waits to run, and once it runs (then it fails).

    The second is short: its client sees a silence, and a stable error within two seconds is worth more.
    """

    loading_s: float = 30.0
    lost_s: float = 1.5

    def limit_s(self, job: Job) -> float:
        return self.lost_s if job.lost_adapter else self.loading_s
