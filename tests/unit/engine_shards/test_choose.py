"""How many shards an engine has, from what it must hold and what there is."""

import itertools

import pytest

from infinilora.engine.assemble import ModelOptions
from infinilora.engine.model.checkpoint import RandomTensors
from infinilora.engine.model.cut import Cut, weight_numbers
from infinilora.engine.model.spec import spec_from_config
from infinilora.engine.shards.choose import Need, choose_shards, needs_of
from infinilora.protocol.errors import InvalidRequest

GB = 10**9
NEEDS = [Need(1, 60 * GB, 20 * GB), Need(2, 31 * GB, 10 * GB), Need(4, 16 * GB, 5 * GB)]


@pytest.mark.parametrize(
    ("device_gb", "num_devices", "wanted"),
    [(141, 8, 1), (89, 8, 1), (88, 8, 2), (46, 8, 2), (45, 8, 4), (24, 4, 4)],
)
def test_the_fewest_shards_that_fit_a_device_each(device_gb: int, num_devices: int, wanted: int) -> None:
    assert choose_shards(NEEDS, device_bytes=device_gb * GB, num_devices=num_devices) == wanted


@pytest.mark.parametrize(("device_gb", "num_devices"), [(45, 2), (20, 8), (141, 0)])
def test_a_model_that_fits_nowhere_is_refused_with_what_was_tried(device_gb: int, num_devices: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{num_devices} devices of .* 4 shards: 16000000000 of weights"):
        choose_shards(NEEDS, device_bytes=device_gb * GB, num_devices=num_devices)


def test_only_powers_of_two_that_the_heads_divide_by_are_tried(tmp_path: object) -> None:
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    spec = spec_from_config(config)
    options = ModelOptions(directory=tmp_path, kv_bytes=1 << 20)  # type: ignore[arg-type]  # not read here
    needs = needs_of(spec, options, 8)
    assert [need.num_shards for need in needs] == [1, 2, 4]
    assert all(a.weight_bytes > b.weight_bytes for a, b in itertools.pairwise(needs))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_as_they_are_held(tied: bool) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    spec = spec_from_config(config)
    names = RandomTensors(spec)._shapes
    whole = sum(RandomTensors(spec).get(name).numel() for name in names)
    table = 100 * 16
    assert weight_numbers(spec, Cut()) == whole + tied * table
    whole_on_each = table + 16 * (1 + 2 * 2)
    layers = whole - whole_on_each - (not tied) * table
    assert weight_numbers(spec, Cut(0, 2)) == layers // 2 + whole_on_each + table
    assert weight_numbers(spec, Cut(1, 2)) == layers // 2 + whole_on_each
