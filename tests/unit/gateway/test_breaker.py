"""Whether a peer may be called."""

from infinilora.gateway.breaker import Breakers


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
