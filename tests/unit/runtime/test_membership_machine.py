"""Processes that live, stop, die and are called dead, and what one observer makes of it. An interval is one second.

The model knows what truly happened; nothing of it is the observer's code.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from typing_extensions import override

from infinilora.protocol.control import Beat
from infinilora.runtime.membership import Membership

NAMES = ("e1", "e2", "e3", "e4")
names = st.sampled_from(NAMES)


@dataclass
class Process:
    """What truly is. `late` are beats that are still on their way."""

    life: int = 0
    seq: int = 0
    is_running: bool = True
    last_heard: float = -1000.0

    def beat(self, name: str) -> Beat:
        self.seq += 1
        return Beat(kind="engine", id=name, incarnation=f"{name}-{self.life}", seq=self.seq, state="ready")


class Observer(RuleBasedStateMachine):
    """Half a second at a time: who runs beats, the observer sweeps, as long as nothing is in the way."""

    def __init__(self) -> None:
        super().__init__()
        self.view = Membership(1.0)
        self.now = 100.0
        self.bus_is_there = True
        self.bus_since = 0.0
        self.processes = {name: Process() for name in NAMES}
        self.late: list[Beat] = []
        self.buried: set[str] = set()
        self.over: set[str] = set()

    @rule(ticks=st.integers(1, 8))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += 0.5
            for name, process in self.processes.items():
                if process.is_running and self.bus_is_there:
                    self._hear(process.beat(name))
                    process.last_heard = self.now
            self._judge()

    def _hear(self, beat: Beat) -> None:
        known = self.view.get("engine", beat.id)
        for change in self.view.hear(beat, self.now):
            assert change.kind in ("joined", "replaced", "alive")
            assert beat.incarnation not in self.buried, "nobody rises who was called dead"
            if change.kind == "replaced" and known is not None:
                self.over.add(known.beat.incarnation)

    def _judge(self) -> None:
        for change in self.view.sweep(self.now):
            if change.kind == "dead":
                process = self.processes[change.member.beat.id]
                assert self.bus_is_there, "a silence that is ours is nobody's death"
                assert self.now - self.bus_since >= 2.0 or self.bus_since == 0.0
                assert self.now - process.last_heard >= 3.0, "three beats were missed"
        if self.view.wants_proof and self.bus_is_there:
            self.view.bus_proved(self.now)

    @rule(name=names)
    def a_process_is_stopped(self, name: str) -> None:
        self.processes[name].is_running = False

    @rule(name=names)
    def a_stopped_process_goes_on(self, name: str) -> None:
        process = self.processes[name]
        process.is_running = True
        if f"{name}-{process.life}" in self.buried:
            process.life += 1

    @rule(name=names)
    def a_process_begins_a_new_life_and_a_beat_of_the_old_one_is_late(self, name: str) -> None:
        process = self.processes[name]
        late = process.beat(name)
        known = self.view.get("engine", name)
        if known is not None and known.beat.incarnation == late.incarnation:  # of a life never heard it would be news
            self.late.append(late)
        process.life += 1
        process.is_running = True

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 100))
    def a_late_beat_comes(self, which: int) -> None:
        beat = self.late[which % len(self.late)]
        known = self.view.get("engine", beat.id)
        self._hear(beat)
        if beat.incarnation in self.over:
            assert self.view.get("engine", beat.id) == known, "what is over changes nothing"
        elif self.processes[beat.id].life == int(beat.incarnation[3:]):
            self.processes[beat.id].last_heard = self.now

    @rule(name=names)
    def the_leader_calls_a_life_dead(self, name: str) -> None:
        member = self.view.get("engine", name)
        if member is not None:
            self.view.bury("engine", name, member.beat.incarnation)
            self.buried.add(member.beat.incarnation)
            process = self.processes[name]
            if process.is_running and member.beat.incarnation == f"{name}-{process.life}":
                process.life += 1

    @rule(is_there=st.booleans())
    def the_bus_goes_or_comes(self, is_there: bool) -> None:
        self.bus_is_there = is_there
        if is_there:
            self.bus_since = self.now
            self.view.bus_proved(self.now)
        else:
            self.view.bus_went()

    @invariant()
    def what_was_called_dead_is_dead_or_over(self) -> None:
        for member in self.view.members():
            if member.beat.incarnation in self.buried:
                assert member.health == "dead"
            assert member.beat.incarnation not in self.over

    @invariant()
    def the_bus_away_means_frozen(self) -> None:
        assert self.bus_is_there or self.view.is_frozen(self.now)

    @override
    def teardown(self) -> None:
        """However it went: when all is well again for a while, everybody who runs is alive and the others are not."""
        self.the_bus_goes_or_comes(is_there=True)
        self.time_passes(ticks=20)
        for name, process in self.processes.items():
            member = self.view.get("engine", name)
            if process.is_running:
                assert member is not None
                assert (member.health, member.beat.incarnation) == ("alive", f"{name}-{process.life}")
            else:
                assert member is None or member.health == "dead"


Observer.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMembership = Observer.TestCase
