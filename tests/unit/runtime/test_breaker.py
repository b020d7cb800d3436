"""The breaker of the store, on a clock of the test's."""

import pytest

from infinilora.protocol.errors import Unavailable
from infinilora.runtime.store import BREAKER_FAILURES, BREAKER_OPEN_S, Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(BREAKER_FAILURES):
        breaker.check()
        breaker.failed()
    return breaker


def test_a_few_failures_open_it(breaker: Breaker) -> None:
    assert breaker.is_open
    with pytest.raises(Unavailable, match="away"):
        breaker.check()


def test_a_success_in_between_keeps_it_closed(clock: Clock) -> None:
    breaker = Breaker(clock)
    for _ in range(BREAKER_FAILURES):
        breaker.failed()
        breaker.succeeded()
    breaker.check()
    assert not breaker.is_open


def test_after_a_while_one_call_may_try_and_the_others_wait(breaker: Breaker, clock: Clock) -> None:
    clock.now += BREAKER_OPEN_S
    breaker.check()
    with pytest.raises(Unavailable, match="away"):
        breaker.check()
    breaker.succeeded()
    breaker.check()


def test_a_failed_try_opens_it_again(breaker: Breaker, clock: Clock) -> None:
    clock.now += BREAKER_OPEN_S
    breaker.check()
    breaker.failed()
    with pytest.raises(Unavailable, match="away"):
        breaker.check()
