"""An adapter that changes nothing is served, and its owner is told."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from infinilora.weights.check import plan_adapter
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.peft import TENSORS_FILE, read_adapter
from infinilora.weights.synth import write_peft_adapter, write_tensors
from infinilora.weights.tensorfile import open_tensors
from support.cards import tiny_cards

CARD = tiny_cards()["llama"]


def codes(directory: Path) -> list[str]:
    return [note.code for note in plan_adapter(read_adapter(directory), CARD).notes]


def written(directory: Path, *, zero: str = "", keep: str = "", **config: Any) -> Path:
    """A random adapter; tensors whose names hold `zero` are zeros, but for those that hold `keep`."""
    write_peft_adapter(directory, CARD, rank=4, targets=["q_proj", "down_proj"])
    file = open_tensors(directory / TENSORS_FILE)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    for name, tensor in tensors.items():
        if zero and zero in name and not (keep and keep in name):
            tensor[...] = 0
    write_tensors(directory / TENSORS_FILE, tensors)
    settings = msgspec.json.decode((directory / CONFIG_FILE).read_bytes())
    (directory / CONFIG_FILE).write_bytes(msgspec.json.encode(settings | config))
    return directory


@pytest.mark.parametrize("how", [{"zero": "lora_B"}, {"zero": "lora_A"}, {"lora_alpha": 0}])
def test_an_adapter_of_zeros_is_told_of(tmp_path: Path, how: dict[str, Any]) -> None:
    assert codes(written(tmp_path, **how)) == ["no_effect"]


@pytest.mark.parametrize("how", [{}, {"zero": "lora_B", "keep": "layers.1.mlp.down_proj"}])
def test_one_pair_that_moves_anything_is_enough(tmp_path: Path, how: dict[str, str]) -> None:
    assert "no_effect" not in codes(written(tmp_path, **how))
