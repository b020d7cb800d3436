"""What each shard holds of a model, and that no column, head or expert is nobody's or two shards'."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from infinilora.engine.model.checkpoint import RandomTensors
from infinilora.engine.model.cut import Cut, CutTensors, check_cut, local_spec, misfit, site_slices
from infinilora.engine.model.spec import ModelSpec, spec_from_config
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import InvalidRequest

_CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "mlp_bias": True,
}


def spec(**changes: object) -> ModelSpec:
    return spec_from_config({**_CONFIG, **changes})


MOE = {"model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MOE |= {"shared_expert_intermediate_size": 10}


@pytest.mark.parametrize(
    ("heads", "kv", "shards", "wanted"),
    [
        (8, 4, 1, [(range(8), range(4))]),
        (8, 4, 2, [(range(4), range(2)), (range(4, 8), range(2, 4))]),
        (8, 2, 4, [(range(2 * s, 2 * s + 2), range(s // 2, s // 2 + 1)) for s in range(4)]),
        (8, 1, 2, [(range(4), range(1)), (range(4, 8), range(1))]),
        (6, 3, 3, [(range(2 * s, 2 * s + 2), range(s, s + 1)) for s in range(3)]),
    ],
)
def test_query_heads_are_dealt_evenly_and_find_their_kv_heads(
    heads: int, kv: int, shards: int, wanted: list[tuple[range, range]]
) -> None:
    whole = spec(num_attention_heads=heads, num_key_value_heads=kv, head_dim=4)
    cuts = [Cut(shard, shards) for shard in range(shards)]
    assert [(cut.heads(whole), cut.kv_heads(whole)) for cut in cuts] == wanted
    for cut in cuts:
        used = {head // (heads // kv) for head in cut.heads(whole)}
        assert used == set(cut.kv_heads(whole))


@pytest.mark.parametrize(
    ("changes", "shards", "why"),
    [
        ({}, 3, "8 attention heads do not divide by 3"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "3 KV heads and 2 shards"),
        ({"intermediate_size": 3}, 4, "3 columns or experts is narrower than 4"),
        ({**MOE, "num_experts": 2, "intermediate_size": 1}, 4, "2 columns or experts is narrower than 4"),
        ({}, 4, ""),
        ({**MOE, "intermediate_size": 1}, 4, ""),
    ],
)
def test_a_model_that_does_not_divide_says_why_and_what_would(
    changes: dict[str, object], shards: int, why: str
) -> None:
    whole = spec(**changes)
    if not why:
        check_cut(whole, shards)
        return
    with pytest.raises(InvalidRequest, match=why) as refused:
        check_cut(whole, shards)
    fitting = [n for n in range(1, whole.num_heads + 1) if not misfit(whole, n)]
    assert f"wanted one of {', '.join(map(str, fitting))}" in refused.value.message
    assert fitting
    assert shards not in fitting


def gathered(name: str, pieces: list[Tensor], whole: Tensor) -> Tensor:
    """The pieces of one tensor put together again, by shape alone."""
    if all(piece.shape == whole.shape for piece in pieces):
        is_row_bias = name.endswith(("o_proj.bias", "down_proj.bias"))
        return torch.stack(pieces).sum(0) if is_row_bias else pieces[0]
    dim = next(d for d in range(whole.dim()) if pieces[0].shape[d] != whole.shape[d])
    return torch.cat(pieces, dim)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "moe"])
def test_the_shards_tensors_together_are_the_models(changes: dict[str, object], shards: int) -> None:
    whole = spec(**changes)
    source = _Numbered(whole)
    for name in source.names:
        pieces = [CutTensors(source, whole, Cut(shard, shards)).get(name) for shard in range(shards)]
        assert torch.equal(gathered(name, pieces, source.get(name)), source.get(name)), name
        is_whole = ".experts." in name or name.endswith(("o_proj.bias", "down_proj.bias"))
        is_cut = "_proj." in name and not is_whole
        assert is_cut == (pieces[0].shape != source.get(name).shape), name


class _Numbered(RandomTensors):
    """Every entry of every tensor is another number, biases too."""

    def __init__(self, whole: ModelSpec) -> None:
        super().__init__(whole)
        self.names = list(self._shapes)

    @override
    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_slices_of_sites_cover_each_column_once_and_copy_a_kv_head_that_several_shards_need() -> None:
    whole = spec(num_key_value_heads=2, head_dim=4)
    cuts = [Cut(shard, 4) for shard in range(4)]
    tables = [site_slices(whole, cut) for cut in cuts]
    columns = [list(_columns(table[1, Site.QKV].outputs)) for table in tables]
    assert sorted(c for shard in columns for c in shard if c < whole.q_dim) == list(range(whole.q_dim))
    assert [[c for c in shard if c >= whole.q_dim] for shard in columns] == [
        [32, 33, 34, 35, 40, 41, 42, 43],
        [32, 33, 34, 35, 40, 41, 42, 43],
        [36, 37, 38, 39, 44, 45, 46, 47],
        [36, 37, 38, 39, 44, 45, 46, 47],
    ]
    assert [table[1, Site.DOWN].inputs for table in tables] == [(0, 12), (12, 25), (25, 37), (37, 50)]
    gate_up = sorted(c for table in tables for c in _columns(table[1, Site.GATE_UP].outputs))
    assert gate_up == list(range(100))
    for cut, table in zip(cuts, tables, strict=True):
        own = local_spec(whole, cut)
        assert len(list(_columns(table[0, Site.QKV].outputs))) == own.qkv_dim
        assert len(list(_columns(table[0, Site.GATE_UP].outputs))) == 2 * own.mlp_dim


def test_a_whole_model_has_no_slices_and_experts_go_in_runs() -> None:
    whole = spec(**MOE)
    assert site_slices(whole, Cut()) == {}
    assert local_spec(whole, Cut()) == whole
    assert whole.moe is not None
    assert [Cut(shard, 2).experts(whole.moe) for shard in (0, 1)] == [range(2), range(2, 5)]
    assert (0, Site.MOE_DOWN) not in site_slices(whole, Cut(0, 2))
    assert site_slices(whole, Cut(1, 2))[0, Site.SHARED_DOWN].inputs == (5, 10)
    assert replace(whole, moe=None) == replace(local_spec(whole, Cut()), moe=None)


def _columns(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [column for begin, end in runs for column in range(begin, end)]
