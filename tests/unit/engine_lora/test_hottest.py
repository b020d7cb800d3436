"""Which adapters an engine keeps for itself, by table."""

import pytest

from infinilora.engine.lora.hottest import Warmth, choose_hottest
from infinilora.protocol.ids import Digest

A, B, C, D = (Digest(f"sha256:{letter * 64}") for letter in "abcd")
LEAST = 0.5


@pytest.mark.parametrize(
    ("adapters", "current", "chosen"),
    [
        pytest.param([], [], [], id="nobody was asked for"),
        pytest.param([(A, 3, 40), (B, 2, 40), (C, 1, 40)], [], [A, B], id="the hottest that fit"),
        pytest.param([(A, 0.4, 10)], [], [], id="one that is used now and then is not brought here"),
        pytest.param([(A, 0.4, 10)], [A], [A], id="one that is here is not sent away for that"),
        pytest.param([(A, 3, 120), (B, 2, 40)], [], [B], id="one that is too large stays out and keeps nobody out"),
        pytest.param([(A, 1.4, 60), (B, 1, 60)], [B], [B], id="not much hotter: whoever is in stays"),
        pytest.param([(A, 1.6, 60), (B, 1, 60)], [B], [A], id="much hotter: it takes the place"),
        pytest.param([(A, 9, 60), (B, 1, 60), (C, 0.9, 30)], [B, C], [A, C], id="the coldest that are in the way go"),
        pytest.param([(A, 9, None), (B, 8, 80)], [], [A], id="unknown sizes count as the average of the known"),
        pytest.param([(d, 9, None) for d in (A, B, C, D)], [], [A, B, C, D], id="none known: an eighth each"),
        pytest.param([(A, 2, 60), (B, 2, 60)], [], [A], id="a tie is broken by name, always the same way"),
    ],
)
def test_the_hottest_are_chosen_with_a_bias_for_those_in_place(
    adapters: list[tuple[Digest, float, int | None]], current: list[Digest], chosen: list[Digest]
) -> None:
    known = [Warmth(*each) for each in adapters]
    assert choose_hottest(known, current, capacity_bytes=100, least_heat=LEAST) == set(chosen)
    assert choose_hottest(known, chosen, capacity_bytes=100, least_heat=LEAST) == set(chosen), "it settles"
