"""What `benchmarks/gpu/bench_tpot.py` says that a step must read, worked by hand. It times nothing here."""

from pathlib import Path
from types import ModuleType

import pytest

from infinilora.engine.model.spec import spec_from_config

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
DENSE = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
EXPERTS = DENSE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
ATTENTION, MLP, NORMS = 8 * 8 + 2 * 4 * 8 + 8 * 8, 3 * 8 * 12, 2 * 8
ENDS = 100 * 8 + 8
"""The head and the last norm: of the embedding a step reads some rows."""


@pytest.fixture
def tpot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
    import bench_tpot  # type: ignore[import-not-found]

    return bench_tpot  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_of_a_dense_base_is_read_once(tpot: ModuleType, *, tied: bool) -> None:
    spec = spec_from_config(DENSE | {"tie_word_embeddings": tied})
    assert tpot.base_bytes(spec, rows=64) == 2 * (2 * (ATTENTION + MLP + NORMS) + ENDS)


def test_of_experts_those_are_read_that_rows_are_expected_to_choose(tpot: ModuleType) -> None:
    spec = spec_from_config(EXPERTS)
    router = 4 * 8
    for rows, read in ((1, 1 / 2), (2, 3 / 4), (3, 7 / 8)):
        wanted = 2 * (2 * (ATTENTION + router + NORMS + 4 * read * MLP) + ENDS)
        assert tpot.base_bytes(spec, rows=rows) == pytest.approx(wanted)


def test_of_an_adapter_its_own_ranks_are_read_and_its_own_rows_experts(tpot: ModuleType) -> None:
    spec = spec_from_config(EXPERTS)
    pairs = 4 * (8 + 12) * 3
    assert tpot.adapter_bytes(spec, ("w1", "w2", "w3"), 5, rows=2) == pytest.approx(2 * 2 * 5 * pairs * 3 / 4)
    assert tpot.adapter_bytes(spec, ("q_proj",), 5, rows=2) == 2 * 2 * 5 * (8 + 8)


def test_each_batch_stands_beside_its_own_floor(tpot: ModuleType) -> None:
    spec = spec_from_config(DENSE)
    found = tpot.beside_floors({"tpot_ms": {"base": 1.0, "8": 2.0, "16": 3.0}}, spec, ("q_proj",), 1e6)
    base_ms = 1e3 * tpot.base_bytes(spec, 64) / 1e6
    own_ms = 1e3 * 2 * 2 * tpot.RANK * 16 / 1e6
    assert found["floor_ms"] == pytest.approx(
        {"base": base_ms, "8": base_ms + 8 * own_ms, "16": base_ms + 16 * own_ms}, abs=1e-3
    )
    assert found["over_floor"]["16"] == pytest.approx(3.0 / found["floor_ms"]["16"], abs=1e-2)
