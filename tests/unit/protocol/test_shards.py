"""Every site and every expert of a base has one owner, and the load is even."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.shards import Shape, Sharding
from support.cards import make_card, tiny_cards

WAYS = st.integers(1, 5)


def sharding(card: BaseCard, expert_parallel: int, layer_parallel: int) -> Sharding:
    return Sharding(Shape(expert_parallel, layer_parallel), card.num_layers, card.sites)


@given(WAYS, WAYS, st.integers(5, 9), st.integers(1, 13))
def test_everything_has_exactly_one_owner(expert_parallel: int, layer_parallel: int, layers: int, experts: int) -> None:
    card = make_card("qwen3_moe", num_layers=layers, num_experts=experts)
    cut = sharding(card, expert_parallel, layer_parallel)
    shards = range(cut.shape.num_shards)
    for site in card.sites:
        owners = [shard for shard in shards if cut.owns(shard, site.layer, site.site)]
        if site.num_experts:
            held = [x for shard in shards for x in cut.experts(shard, site.layer, site.num_experts)]
            assert held == list(range(site.num_experts))
            assert owners == [s for s in shards if len(cut.experts(s, site.layer, site.num_experts))]
        else:
            assert owners == [cut.dense_shard(site.layer, site.site)]
        assert set(owners) <= set(cut.columns_of(site.layer))


@given(WAYS, st.integers(1, 13))
def test_an_expert_is_in_the_column_that_the_rule_names(expert_parallel: int, experts: int) -> None:
    card = make_card("qwen3_moe", num_layers=1, num_experts=experts)
    cut = sharding(card, expert_parallel, 1)
    for x in range(experts):
        assert x in cut.experts(x * expert_parallel // experts, 0, experts)


@given(WAYS, st.integers(5, 40))
def test_stages_are_runs_of_layers_as_even_as_can_be(layer_parallel: int, layers: int) -> None:
    cut = Sharding(Shape(1, layer_parallel), layers, [])
    stages = [cut.stage_of(layer) for layer in range(layers)]
    assert stages == sorted(stages)
    sizes = Counter(stages)
    assert set(sizes) == set(range(layer_parallel))
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_the_embedding_is_in_the_first_stage_and_lm_head_in_the_last() -> None:
    card = make_card("llama", num_layers=4, outer=True)
    cut = sharding(card, 2, 2)
    assert cut.dense_shard(0, Site.EMBED) in (0, 1)
    assert cut.dense_shard(card.num_layers, Site.LM_HEAD) in (2, 3)


def test_dense_sites_are_dealt_round_the_columns() -> None:
    card = make_card("llama", num_layers=2)
    cut = sharding(card, 4, 1)
    found = [[cut.dense_shard(layer, s) for s in (Site.QKV, Site.O, Site.GATE_UP, Site.DOWN)] for layer in (0, 1)]
    assert found == [[0, 1, 2, 3], [1, 2, 3, 0]]


@pytest.mark.parametrize("name", sorted(tiny_cards()))
def test_a_group_of_one_owns_everything(name: str) -> None:
    card = tiny_cards()[name]
    cut = sharding(card, 1, 1)
    assert all(cut.owns(0, site.layer, site.site) for site in card.sites)


def test_a_site_that_the_base_has_not_is_nobodys() -> None:
    cut = sharding(make_card("llama", num_layers=2), 2, 2)
    assert not any(cut.owns(shard, 0, Site.ROUTER) for shard in range(4))


def test_shapes_are_read_and_written() -> None:
    assert Shape.parse("2x4") == Shape(2, 4)
    assert str(Shape(2, 4)) == "2x4"
    assert Shape(2, 4).num_shards == 8


@pytest.mark.parametrize("text", ["", "2", "2x", "x4", "0x1", "1x0", "2x2x2", "-1x2", "65x1", "two"])
def test_what_is_no_shape_is_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"wanted"):
        Shape.parse(text)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"3 stages; this base has 2"):
        sharding(make_card("llama", num_layers=2), 1, 3)
