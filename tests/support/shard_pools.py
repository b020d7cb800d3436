"""What tests of engine shards share: a pool of adapters for each shard, and what they ask and hold answers against."""

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from infinilora.engine.assemble import LoadedModel
from infinilora.engine.lora.interface import LoraBackend
from infinilora.engine.lora.local import LocalLora
from infinilora.engine.sched.scheduler import Limits
from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.pool.pool import AdapterPool, PoolConfig
from infinilora.protocol import keys
from infinilora.protocol.adapter import BaseCard, manifest_digest
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from infinilora.weights.ingest import ingest
from support.engines import Heard
from support.oracle import Oracle
from support.tiny_models import VOCAB

LIMITS = Limits(max_running=8, step_tokens=9)


def prompt(length: int) -> list[int]:
    dice = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCAB, (length,), generator=dice).tolist()


def error_of(heard: Heard, asked: list[int], oracle: Oracle, adapter: Path | None = None) -> float:
    logprobs = torch.log_softmax(oracle.logits(asked + heard.tokens, adapter), -1)
    told = (*heard.prompt_scores, *heard.scores)
    return max(abs(float(logprobs[at, score.token_id]) - score.logprob) for at, score in enumerate(told))


class Pools:
    """A pool for each shard, over one store."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.blobs = DirectoryBlobs(work / "store")
        self.made: list[AdapterPool] = []
        self.deaths: list[BaseException] = []
        self._lock = threading.Lock()

    def lora_of(self, model: LoadedModel, ring: Callable[[], None]) -> LoraBackend:
        config = PoolConfig(
            base=model.card.fingerprint,
            num_layers=model.card.num_layers,
            capacity_bytes=8 << 20,
            num_slots=4,
            cache_dir=self.work / f"cache-{model.decoder.shards.cut.shard}",
            cache_bytes=8 << 20,
            share=model.share,
        )
        kernels = SlotKernels(num_slots=4, num_layers=model.card.num_layers + 1)
        pool = AdapterPool(config, self.blobs, kernels, on_death=self.deaths.append)
        with self._lock:
            self.made.append(pool)
        return LocalLora(pool, ring, first_expert=model.first_expert)

    def add(self, directory: Path, card: BaseCard) -> Digest:
        packed = self.work / f"{directory.name}.packed"
        digest = manifest_digest(ingest(directory, card, packed))
        self.blobs.put_file(keys.packed(digest), packed)
        return digest

    def close(self) -> None:
        for pool in self.made:
            pool.close()
        assert not self.deaths
