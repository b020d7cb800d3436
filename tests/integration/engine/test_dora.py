"""DoRA that PEFT itself wrote, served by an engine of its own pool: as PEFT's forward and its own merge compute it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from infinilora.protocol import keys
from infinilora.protocol.adapter import manifest_digest
from infinilora.protocol.ids import Digest
from support.answers import ingest_answered
from support.peft_house import PROMPT, House, logprobs, worst

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]

TOLERANCE = 1e-3
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "every projection": ("llama", {"target_modules": EVERY}),
    "biases of the base": ("qwen2", {"target_modules": EVERY}),
    "biases everywhere": ("llama-biased", {"target_modules": EVERY}),
    "one part of a fused site": ("qwen2", {"target_modules": ["k_proj", "up_proj"]}),
    "rsLoRA": ("qwen2", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "a rank and an alpha of its own": (
        "llama",
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"q_proj": 21}},
    ),
    "lm_head": ("llama", {"target_modules": ["lm_head", "o_proj"]}),
    "lm_head of a tied base": ("llama-tied", {"target_modules": ["lm_head", "q_proj"]}),
    "beside experts": ("qwen2_moe", {"target_modules": ["q_proj", "shared_expert.up_proj", "shared_expert_gate"]}),
}


@dataclass(frozen=True)
class Trained:
    """A directory that PEFT saved, and what PEFT computes with it: its forward, and the merged model's."""

    directory: Path
    forward: Callable[[list[int]], Tensor]
    merged: Callable[[list[int]], Tensor]


class DoraHouse(House):
    """Whose adapters PEFT has made, with magnitudes."""

    def trained(self, config: dict[str, Any]) -> Trained:
        """Random pairs, and magnitudes that are not the rows' own."""
        torch.manual_seed(11)
        options: dict[str, Any] = {"r": 5, "lora_alpha": 9, "use_dora": True, "init_lora_weights": False, **config}
        model = peft.get_peft_model(self.tiny.hf, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.6))
                elif "lora_" in name:
                    parameter.normal_(std=0.2)
        directory = self.work / "adapter"
        model.save_pretrained(directory, save_embedding_layers=False)
        assert any("lora_magnitude_vector" in key for key in load_file(directory / "adapter_model.safetensors"))

        def merged(tokens: list[int]) -> Tensor:
            if self.tiny.hf.config.tie_word_embeddings:  # as PEFT advises: the embedding is not merged into
                head = model.base_model.model.lm_head.base_layer
                head.weight = torch.nn.Parameter(head.weight.detach().clone())
            return logprobs(model.merge_and_unload(), tokens)

        return Trained(directory, lambda tokens: logprobs(model, tokens), merged)

    def packed(self, directory: Path, **options: str) -> Digest:
        file = self.work / "packed"
        manifest = ingest_answered(directory, self.model.card, self.tiny.directory, file, **options)
        digest = manifest_digest(manifest)
        self.blobs.put_file(keys.packed(digest), file)
        return digest


@pytest.mark.parametrize("what", ADAPTERS)
def test_dora_is_served_as_peft_computes_it_and_as_it_merges_it(what: str, tmp_path: Path) -> None:
    name, config = ADAPTERS[what]
    house = DoraHouse(tmp_path, name)
    _, base_scores = house.served(None)
    trained = house.trained(config)

    tokens, scores = house.served(house.packed(trained.directory))

    said = PROMPT + tokens
    assert worst(scores, trained.forward(said), said) < TOLERANCE
    assert worst(scores, trained.merged(said), said) < TOLERANCE
    assert max(abs(a - b) for a, b in zip(scores[:16], base_scores[:16], strict=True)) > 0.1, "it does move something"
    house.close()
