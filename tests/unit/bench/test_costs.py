"""What a first token that joined others took, from when their tokens came."""

import pytest

from infinilora.bench.costs import joined_point, window_s
from infinilora.bench.load import Timeline


def stream(first_s: float, tokens: int) -> Timeline:
    return Timeline("base", first_s - 0.1, [first_s + 0.02 * n for n in range(tokens)])


def first(sent_s: float, ttft_s: float) -> Timeline:
    return Timeline("base", sent_s, [sent_s + ttft_s])


BACKGROUND = [stream(1.0, 100), stream(1.2, 100)]
"""Both decode from 1.2 to 2.98, a token each every 20 ms."""


def test_half_a_step_of_those_that_decode_is_not_the_joiners() -> None:
    point = joined_point(BACKGROUND, [first(1.5, 0.05), first(1.7, 0.07)], prompt=32, adapters=1)
    assert point is not None
    assert point.seconds == pytest.approx(0.06 - 0.01)
    assert (point.rows, point.tokens, point.is_first, point.adapters) == (34, 3, True, 1)
    assert point.context == 32 + 2 * (16 + 50)


def test_who_came_before_or_after_all_decoded_does_not_count() -> None:
    joins = [first(1.1, 0.5), first(1.5, 0.05), first(2.95, 0.5)]
    point = joined_point(BACKGROUND, joins, prompt=8, adapters=0)
    assert point is not None
    assert point.seconds == pytest.approx(0.04)
    assert joined_point(BACKGROUND, [first(2.95, 0.5)], prompt=8, adapters=0) is None


def test_a_window_is_from_the_last_first_token_to_the_first_last() -> None:
    assert window_s(BACKGROUND) == pytest.approx(2.98 - 1.2)
    assert window_s([stream(1.0, 5), stream(2.0, 5)]) < 0
