"""Adapters that PEFT itself wrote, ingested and served by an engine of its own pool: as transformers with PEFT does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from infinilora.engine.lora.interface import LeaseStatus
from infinilora.protocol import keys
from infinilora.protocol.adapter import manifest_digest
from infinilora.protocol.ids import Digest
from infinilora.weights.ingest import ingest
from support.peft_house import PROMPT, House, logprobs, worst

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'.* have invalid shape"),  # PEFT's own, of its biases
]

TOLERANCE = 1e-3

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lm_head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "o_proj"]}),
    "both of a tied base": ("llama-tied", {"target_modules": ["embed_tokens", "lm_head"], "r": 3}),
    "a bias of lora_B": ("qwen2", {"target_modules": ["q_proj", "o_proj", "up_proj"], "lora_bias": True}),
    "gate of the shared expert": ("qwen2_moe", {"target_modules": ["shared_expert_gate", "v_proj"]}),
}


class PeftHouse(House):
    """Whose adapters PEFT has made."""

    def trained(self, config: dict[str, Any]) -> tuple[Digest, Callable[[list[int]], Tensor]]:
        """The digest of an adapter that PEFT made, of random weights, and PEFT's own log-probabilities with it."""
        torch.manual_seed(11)
        options: dict[str, Any] = {"r": 5, "lora_alpha": 9, "init_lora_weights": False, **config}
        model = peft.get_peft_model(self.tiny.hf, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.2)
        source = self.work / "adapter"
        model.save_pretrained(source)
        packed = self.work / "packed"
        digest = manifest_digest(ingest(source, self.model.card, packed))
        self.blobs.put_file(keys.packed(digest), packed)

        return digest, lambda tokens: logprobs(model, tokens)


@pytest.mark.parametrize("what", ADAPTERS)
def test_what_peft_wrote_is_served_as_peft_computes_it(what: str, tmp_path: Path) -> None:
    name, config = ADAPTERS[what]
    house = PeftHouse(tmp_path, name)
    base_tokens, base_scores = house.served(None)
    plain = house.tiny.logprobs(PROMPT + base_tokens)
    digest, by_peft = house.trained(config)

    tokens, scores = house.served(digest)

    assert worst(scores, by_peft(PROMPT + tokens), PROMPT + tokens) < TOLERANCE
    assert worst(base_scores, plain, PROMPT + base_tokens) < TOLERANCE
    assert max(abs(a - b) for a, b in zip(scores[:16], base_scores[:16], strict=True)) > 0.1, "it does move something"
    assert house.lora.view(digest).status is not LeaseStatus.FAILED
    house.close()
