"""Every choice of every row goes to exactly one column, as that column numbers its experts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinilora.engine.lora.columns import NO_EXPERT, ColumnPicks, Picks, picks_of
from infinilora.engine.lora.interface import Routing
from infinilora.engine.lora.layout import Range
from infinilora.protocol.shards import Shape, Sharding
from support.cards import make_card


def routing_of(rows: int, topk: int, experts: int, seed: int) -> Routing:
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (rows, topk), generator=dice, dtype=torch.int32)
    return Routing(ids, torch.rand(rows, topk, generator=dice))


def choices_of(picks: Picks, first_expert: int, first_row: int) -> list[tuple[int, int, int, float]]:
    """(row, place, expert, weight) of everything that is sent as a choice."""
    found = []
    for r, row in enumerate(picks.rows.tolist()):
        assert int(picks.ids[r, 0]) == row + first_row, "what is sent is the step's row"
        for j, place in enumerate(picks.places[r].tolist()):
            number = int(picks.ids[r, 1 + j])
            if number != NO_EXPERT:
                found.append((row, place, number + first_expert, float(picks.weights[r, 1 + j])))
    return found


@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 99),
)
def test_each_choice_is_sent_once(
    columns: int, experts: int, rows: int, topk: int, start: int, first: int, seed: int
) -> None:
    card = make_card("qwen3_moe", num_layers=1, num_experts=experts)
    sharding = Sharding(Shape(columns, 1), 1, card.sites)
    routing, part = routing_of(rows + start, topk, experts, seed), Range(0, start, rows + start)
    found: list[tuple[int, int, int, float]] = []
    for shard in range(columns):
        own = sharding.experts(shard, 0, experts)
        picks = picks_of(routing, part, own, first)
        if picks is None:
            continue
        assert picks.rows.tolist() == sorted(set(picks.rows.tolist())), "each row once, in order"
        assert (picks.ids[:, 1] != NO_EXPERT).all(), "a row's own choices come first, and it has one"
        assert all(len(set(places)) == len(places) for places in picks.places.tolist())
        sent = choices_of(picks, own.start, first)
        assert all(expert in own for _, _, expert, _ in sent)
        found += sent
    wanted = [
        (row, place, int(routing.topk_ids[row, place]), float(routing.topk_weights[row, place]))
        for row in range(start, rows + start)
        for place in range(topk)
    ]
    assert sorted(found) == wanted


def test_the_picks_of_a_layer_are_made_once_and_those_of_the_next_anew() -> None:
    picks, rows = ColumnPicks(), Range(0, 0, 4)
    first, second = routing_of(4, 2, 4, 1), routing_of(4, 2, 4, 2)
    made = picks.of(first, rows, range(2))
    assert picks.of(first, rows, range(2)) is made
    again = picks.of(second, rows, range(2))
    assert again is not made
    assert picks.of(second, rows, range(2, 4)) is not again
