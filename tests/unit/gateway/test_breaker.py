"""Whether a peer may be called."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from infinilora.gateway.breaker import LAST_PAUSE_S, Breakers

KEYS = st.sampled_from(["a", "b", "c"])


def test_silence_opens_it_and_an_answer_closes_it() -> None:
    breakers = Breakers()
    assert not breakers.is_open("a")
    breakers.note_silence("a", 10.0)
    assert (breakers.is_open("a"), breakers.is_open("b")) == (True, False)
    breakers.note_answer("a")
    assert not breakers.is_open("a")
    assert breakers.due(100.0) == []


def test_health_is_asked_with_pauses_that_double_up_to_a_bound() -> None:
    breakers, asked, now = Breakers(), list[float](), 0.0
    breakers.note_silence("a", now)
    while now < 10:
        now += 0.125
        asked += [now] * len(breakers.due(now))
    assert asked == [0.25, 0.75, 1.75, 3.75, 5.75, 7.75, 9.75]


def test_many_calls_that_end_at_once_are_one_silence() -> None:
    breakers = Breakers()
    for _ in range(50):
        breakers.note_silence("a", 0.0)
    assert breakers.due(0.25) == ["a"]
    breakers.note_silence("a", 0.375)
    assert breakers.due(0.625) == []


def test_those_who_have_left_are_forgotten() -> None:
    breakers = Breakers()
    breakers.note_silence("a", 0.0)
    breakers.note_silence("b", 0.0)
    breakers.keep({"b"})
    assert breakers.due(9.0) == ["b"]


class BreakerMachine(RuleBasedStateMachine):
    """Calls that end without an answer, health that is answered or not, engines that leave, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.breakers = Breakers()
        self.now = 0.0
        self.silent: dict[str, float] = {}
        """Since when nobody has answered there, or when health was last asked."""

    @rule(key=KEYS)
    def is_silent(self, key: str) -> None:
        self.breakers.note_silence(key, self.now)
        self.silent.setdefault(key, self.now)

    @rule(key=KEYS)
    def answers(self, key: str) -> None:
        self.breakers.note_answer(key)
        self.silent.pop(key, None)

    @rule(seconds=st.floats(0.01, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = self.breakers.due(self.now)
        late = {key for key, since in self.silent.items() if self.now - since > LAST_PAUSE_S}
        assert late <= set(due) <= self.silent.keys(), "nobody waits longer than the longest pause"
        assert self.breakers.due(self.now) == [], "nobody is asked twice"
        self.silent |= dict.fromkeys(due, self.now)

    @rule(keys=st.sets(KEYS))
    def leave(self, keys: set[str]) -> None:
        self.breakers.keep(keys)
        self.silent = {key: since for key, since in self.silent.items() if key in keys}

    @invariant()
    def those_are_open_that_have_not_answered_since(self) -> None:
        assert {key for key in ("a", "b", "c") if self.breakers.is_open(key)} == self.silent.keys()


TestBreakers = BreakerMachine.TestCase
