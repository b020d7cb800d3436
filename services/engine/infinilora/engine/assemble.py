"""Puts an engine together from a model directory: weights, cache, runner, loop. No network, no settings object."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from infinilora.engine.events import Hooks
from infinilora.engine.job import Patience
from infinilora.engine.loop import EngineLoop
from infinilora.engine.lora.interface import LoraBackend
from infinilora.engine.model.checkpoint import Checkpoint, RandomTensors, TensorSource
from infinilora.engine.model.cpu import CpuOps
from infinilora.engine.model.decoder import Decoder
from infinilora.engine.model.kv import KvCache, block_bytes
from infinilora.engine.model.ops import Ops, TorchOps
from infinilora.engine.model.spec import ModelSpec, read_spec
from infinilora.engine.model.weights import load_weights
from infinilora.engine.prepare import base_card
from infinilora.engine.runner import Runner
from infinilora.engine.sched.blocks import BlockPool
from infinilora.engine.sched.pingpong import PingPong
from infinilora.engine.sched.scheduler import Limits
from infinilora.engine.sizes import Sizes, derive_sizes
from infinilora.engine.timeline import TimedOps, Timeline
from infinilora.engine.wire import ModelFacts
from infinilora.protocol.adapter import BaseCard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How to hold a model. Zeros are derived (see sizes.py)."""

    directory: Path
    served_name: str = ""
    load_format: Literal["auto", "dummy"] = "auto"
    device: str = "cpu"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    threads: int = 1
    kv_bytes: int = 0
    kv_block: int = 16
    max_model_len: int = 0
    max_running: int = 64
    timeline: Timeline | None = None
    """Where the device's operations are recorded."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run, its card, the room it has, and the tensors that it was made of."""

    decoder: Decoder
    card: BaseCard
    sizes: Sizes
    source: TensorSource

    @property
    def activation_dtype(self) -> str:
        """As a link's Hello names it."""
        return {torch.float32: "F32", torch.bfloat16: "BF16"}[self.decoder.ops.dtype]

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            vocab_size=self.card.vocab_size,
            max_model_len=self.sizes.max_model_len,
            eos_token_ids=frozenset(self.card.eos_token_ids),
        )


def load_model(options: ModelOptions) -> LoadedModel:
    """Read and pack the weights; seconds to minutes."""
    started = time.perf_counter()
    spec = read_spec(options.directory)
    ops = _ops(options) if options.timeline is None else TimedOps(_ops(options), options.timeline)
    sizes = derive_sizes(
        max_exact_len=spec.max_exact_len,
        wanted_len=options.max_model_len,
        bytes_per_block=block_bytes(spec, block_size=options.kv_block, dtype=ops.dtype),
        block_size=options.kv_block,
        wanted_kv_bytes=options.kv_bytes,
        max_running=options.max_running,
    )
    source = _source(options, spec)
    name = options.served_name or options.directory.resolve().name
    hashing = time.perf_counter()
    card = base_card(spec, source, directory=options.directory, name=name, max_len=sizes.max_model_len)
    hashing_s = time.perf_counter() - hashing
    weights = load_weights(spec, source, ops, max_len=sizes.max_model_len)
    kv = KvCache.allocate(
        spec, num_blocks=sizes.num_blocks, block_size=sizes.block_size, device=ops.device, dtype=ops.dtype
    )
    logger.info(
        "model loaded",
        extra={
            "model": name,
            "fingerprint": card.fingerprint,
            "max_model_len": sizes.max_model_len,
            "longest_exact": spec.max_exact_len,
            "kv_blocks": sizes.num_blocks,
            "kv_block_tokens": sizes.block_size,
            "kv_bytes": sizes.kv_bytes,
            "seconds_hashing": round(hashing_s, 2),
            "seconds": round(time.perf_counter() - started, 2),
        },
    )
    return LoadedModel(Decoder(spec, weights, ops, kv), card, sizes, source)


def make_loop(
    model: LoadedModel,
    lora: LoraBackend,
    limits: Limits,
    *,
    max_waiting: int = 256,
    patience: Patience | None = None,
    hooks: Hooks | None = None,
    pingpong: PingPong | None = None,
) -> EngineLoop:
    """An engine loop over a loaded model; not started."""
    pool = BlockPool(model.sizes.num_blocks, model.sizes.block_size)
    runner = Runner(model.decoder, lora, block_size=model.sizes.block_size, pingpong=pingpong)
    return EngineLoop(runner, lora, limits, pool, max_waiting=max_waiting, patience=patience, hooks=hooks)


def _ops(options: ModelOptions) -> Ops:
    if options.device == "cpu":
        return CpuOps(storage="bf16" if options.dtype == "bf16" else "fp32", threads=options.threads)
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    return TorchOps(torch.device(options.device), dtype)


def _source(options: ModelOptions, spec: ModelSpec) -> TensorSource:
    return RandomTensors(spec) if options.load_format == "dummy" else Checkpoint(options.directory, spec)
