"""A tiny base, an engine of it with a pool of its own, and what PEFT computes with the same base."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinilora.engine.lora.local import LocalLora
from infinilora.engine.sched.scheduler import Limits
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from support.engines import TestEngine, load_tiny
from support.tiny_models import VOCAB, make_tiny_model

PROMPT = torch.randint(3, VOCAB, (17,), generator=torch.Generator().manual_seed(4)).tolist()


class House:
    """How adapters come into its store is the tests' own."""

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

    def served(self, digest: Digest | None) -> tuple[list[int], list[float]]:
        """Six greedy tokens after the prompt, and the log-probabilities of prompt and tokens, beside a base row."""
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


def logprobs(model: Any, tokens: list[int]) -> Tensor:
    """As transformers computes them: [tokens, vocabulary]."""
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return out


def worst(scores: list[float], oracle: Tensor, tokens: list[int]) -> float:
    """The largest difference of scores from the oracle's, token by token."""
    wanted = [float(oracle[at, token]) for at, token in enumerate(tokens[1:])]
    return max(abs(a - b) for a, b in zip(scores, wanted, strict=True))
