"""Rows whose adapter still loads: passes that go through the model as the layers come, apart from all other rows.

    schedule -> Plan.loading -> a pass --(layers are there)--> some layers further --> ... --> through, and sampled
                                  |                                                    |
                                  +-- a sequence left or was preempted: given up ------+-- tenancy lost: rows lost

A pass never waits: where a layer is missing it is parked, and the time goes to whoever can run (law 6). One pass moves
at a time, between two steps, so that rows of resident adapters wait for as many layers as one step has at most.
"""

import time

from infinilora.engine.runner import Outcome, Pass, Runner
from infinilora.engine.sched.scheduler import Rows, Scheduler


class LoadingPasses:
    """Passes under way, the one that moved longest ago first. Step thread only."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._passes: list[Pass] = []

    def open(self, rows: list[Rows]) -> None:
        """Begin a pass of what `schedule` planned, unless one of its sequences has ended meanwhile."""
        if all(item.sequence.is_parked for item in rows):
            self._passes.append(self._runner.open(rows))
        else:
            self._scheduler.unpark(item.sequence for item in rows)

    def advance(self) -> tuple[bool, Outcome | None, float]:
        """Move one pass: whether one moved, what came of it if it is over, and how long it took in all."""
        self._give_up_broken()
        part = next(filter(self._runner.can_advance, self._passes), None)
        if part is None:
            return False, None, 0.0
        started = time.perf_counter()
        outcome = self._runner.advance(part)
        part.seconds += time.perf_counter() - started
        self._passes.remove(part)
        if outcome is None:
            self._passes.append(part)
        else:
            self._scheduler.unpark(item.sequence for item in part.rows)
        return True, outcome, part.seconds

    def check_idle(self) -> None:
        self._give_up_broken()
        assert not self._passes, f"{len(self._passes)} passes are left in the model"

    def _give_up_broken(self) -> None:
        """Whoever left gave its blocks away, and they may be another's: nothing of its pass is computed any more."""
        for part in [p for p in self._passes if not all(item.sequence.is_parked for item in p.rows)]:
            self._passes.remove(part)
            self._scheduler.unpark(item.sequence for item in part.rows)
