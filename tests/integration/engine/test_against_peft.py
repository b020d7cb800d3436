"""Adapters that PEFT itself wrote, ingested and served by an engine of its own pool: as transformers with PEFT does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from infinilora.engine.lora.interface import LeaseStatus
from infinilora.engine.lora.local import LocalLora
from infinilora.engine.sched.scheduler import Limits
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.protocol import keys
from infinilora.protocol.adapter import manifest_digest
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.weights.ingest import ingest
from support.engines import TestEngine, load_tiny
from support.tiny_models import VOCAB, make_tiny_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'.* have invalid shape"),  # PEFT's own, of its biases
]

TOLERANCE = 1e-3
PROMPT = torch.randint(3, VOCAB, (17,), generator=torch.Generator().manual_seed(4)).tolist()

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lm_head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "o_proj"]}),
    "both of a tied base": ("llama-tied", {"target_modules": ["embed_tokens", "lm_head"], "r": 3}),
    "a bias of lora_B": ("qwen2", {"target_modules": ["q_proj", "o_proj", "up_proj"], "lora_bias": True}),
    "gate of the shared expert": ("qwen2_moe", {"target_modules": ["shared_expert_gate", "v_proj"]}),
}


class House:
    """A tiny base, and an engine of it with a pool of its own."""

    def __init__(self, work: Path, name: str) -> None:
        self.work = work
        self.tiny = make_tiny_model(name, work / "base")
        self.model = load_tiny(self.tiny.directory)
        self.blobs = DirectoryBlobs(work / "store")
        config = PoolConfig(
            base=self.model.card.fingerprint,
            num_layers=self.model.card.num_layers,
            capacity_bytes=8 << 20,
            num_slots=4,
            cache_dir=work / "cache",
            cache_bytes=8 << 20,
        )
        kernels = SlotKernels(num_slots=4, num_layers=self.model.card.num_layers + 1)
        self.deaths: list[BaseException] = []
        self.pool = AdapterPool(config, self.blobs, kernels, on_death=self.deaths.append)
        self.lora = LocalLora(self.pool, lambda: None)

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

        def logprobs(tokens: list[int]) -> Tensor:
            with torch.inference_mode():
                out: Tensor = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
            return out

        return digest, logprobs

    def served(self, digest: Digest | None) -> tuple[list[int], list[float]]:
        """Six greedy tokens after the prompt, and the log-probabilities of prompt and tokens."""
        engine = TestEngine(self.model, self.lora, limits=Limits(max_running=4, step_tokens=8))
        heard = engine.ask(PROMPT, digest=digest, max_tokens=6, logprobs=0, prompt_logprobs=0)
        beside = engine.ask(PROMPT[:9], max_tokens=2)
        while not heard.is_over or not beside.is_over:
            engine.turn()
        engine.loop.check_idle()
        return heard.tokens, [score.logprob for score in (*heard.prompt_scores, *heard.scores)]

    def close(self) -> None:
        self.lora.close()
        self.pool.close()
        assert not self.deaths


@pytest.mark.parametrize("what", ADAPTERS)
def test_what_peft_wrote_is_served_as_peft_computes_it(what: str, tmp_path: Path) -> None:
    name, config = ADAPTERS[what]
    house = House(tmp_path, name)
    base_tokens, base_scores = house.served(None)
    plain = house.tiny.logprobs(PROMPT + base_tokens)
    digest, logprobs = house.trained(config)

    tokens, scores = house.served(digest)

    for found, oracle, said in ((scores, logprobs(PROMPT + tokens), tokens), (base_scores, plain, base_tokens)):
        wanted = [float(oracle[at, token]) for at, token in enumerate((PROMPT + said)[1:])]
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < TOLERANCE
    assert max(abs(a - b) for a, b in zip(scores[:16], base_scores[:16], strict=True)) > 0.1, "it does move something"
    assert house.lora.view(digest).status is not LeaseStatus.FAILED
    house.close()
