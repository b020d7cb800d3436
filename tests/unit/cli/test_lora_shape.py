"""`--lora-shape auto`: from a model's config and measured constants to a shape; and the file that constants are in."""

import json
from pathlib import Path

import pytest

from infinilora.cli.lora_shape import choose, constants_of, shape_of
from infinilora.cli.stack import Stack
from infinilora.planner.constants import Constant, read_constants, with_measured, write_constants
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.shards import Shape

LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.mark.parametrize(
    ("why", "engines", "lora_threads", "shape"),
    [
        ("room for one process", 4, 1, Shape(1, 1)),
        ("one engine waits for nobody", 1, 8, Shape(1, 1)),
    ],
)
def test_shards_of_one_machine_come_of_what_they_save(
    why: str, engines: int, lora_threads: int, shape: Shape, model: Path
) -> None:
    assert shape_of(choose(model, read_constants(), engines=engines, lora_threads=lora_threads)) == shape, why


def test_engines_that_would_wait_for_one_another_get_stages(model: Path) -> None:
    """Where a call is all launch, and next to nothing is read, a second process doubles what is done at once."""
    busy = with_measured(read_constants(), {"launch_s": 1e-3, "base_step_s": 1e-3, "memory_bytes_per_s": 1e15}, "test")
    found = choose(model, busy, engines=8, lora_threads=4)
    assert shape_of(found) == Shape(1, 4)
    assert found.step_s < found.smallest_step_s


def test_a_model_that_planning_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mamba"}))
    with pytest.raises(InvalidRequest, match="mamba"):
        choose(tmp_path, read_constants(), engines=1, lora_threads=1)


def test_without_a_lora_server_there_is_no_shape_to_choose(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no LoRA server of shape auto"):
        Stack(tmp_path / "var", model=str(model), lora="local", lora_shape="auto")


def test_what_was_measured_is_kept_with_where_it_is_from_and_the_rest_stays(tmp_path: Path) -> None:
    found = with_measured(read_constants(), {"call_s": 7e-6}, "here")
    assert found.call_s == Constant(7e-6, "here")
    assert found.peer_s == read_constants().peer_s
    write_constants(found, tmp_path / "constants.json")
    assert constants_of(tmp_path, threads=1) == found, "nobody measures again"
    with pytest.raises(InvalidRequest, match="Is a directory"):
        write_constants(found, tmp_path)
