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
from infinilora.engine.model.cut import Cut, local_spec, share_of, site_slices
from infinilora.engine.model.decoder import Decoder
from infinilora.engine.model.kv import KvCache, block_bytes
from infinilora.engine.model.ops import Ops, TorchOps
from infinilora.engine.model.shards import Alone, Shards
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
from infinilora.pool.share import Share
from infinilora.pool.slices import SiteSlices
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
    most_kv_bytes: int | None = None
    """Where `kv_bytes` is derived: what the memory leaves for it (fit.py)."""
    kv_block: int = 16
    max_model_len: int = 0
    max_running: int = 64
    timeline: Timeline | None = None
    """Where the device's operations are recorded."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What all shards of an engine agree on before they read their weights."""

    card: BaseCard
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run, its card, the room it has, and the tensors that it was made of.

    Of a model that is cut the decoder is one shard's; `spec`, card and tensors are of the whole.
    """

    decoder: Decoder
    spec: ModelSpec
    card: BaseCard
    sizes: Sizes
    source: TensorSource

    @property
    def slices(self) -> SiteSlices:
        """The columns of sites that the decoder has."""
        return site_slices(self.spec, self.decoder.shards.cut)

    @property
    def share(self) -> Share | None:
        """What a pool beside the decoder holds of each adapter; None: all of it."""
        return share_of(self.spec, self.decoder.shards.cut)

    @property
    def first_expert(self) -> int:
        """Of the decoder's, in a model that has experts."""
        moe = self.spec.moe
        return self.decoder.shards.cut.experts(moe).start if moe else 0

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
    return hold_model(options, plan_model(options), Alone())


def plan_model(options: ModelOptions, cut: Cut | None = None) -> ModelPlan:
    """Look at every tensor, and derive what is not set. Raises InvalidRequest for what cannot be served."""
    cut, spec = cut or Cut(), read_spec(options.directory)
    sizes = sizes_of(options, spec, cut)
    source = _source(options, spec)
    name = options.served_name or options.directory.resolve().name
    started = time.perf_counter()
    card = base_card(spec, source, directory=options.directory, name=name, max_len=sizes.max_model_len)
    seconds = round(time.perf_counter() - started, 2)
    logger.info("model hashed", extra={"fingerprint": card.fingerprint, "seconds_hashing": seconds})
    return ModelPlan(card, sizes)


def sizes_of(options: ModelOptions, spec: ModelSpec, cut: Cut) -> Sizes:
    """What one shard has room for."""
    return derive_sizes(
        max_exact_len=spec.max_exact_len,
        wanted_len=options.max_model_len,
        bytes_per_block=bytes_per_block(options, spec, cut),
        block_size=options.kv_block,
        wanted_kv_bytes=options.kv_bytes,
        max_running=options.max_running,
        most_kv_bytes=options.most_kv_bytes,
    )


def bytes_per_block(options: ModelOptions, spec: ModelSpec, cut: Cut) -> int:
    """Of keys and values on one shard."""
    return block_bytes(local_spec(spec, cut), block_size=options.kv_block, dtype=activation_dtype(options))


def hold_model(options: ModelOptions, plan: ModelPlan, shards: Shards) -> LoadedModel:
    """Read and pack what a shard holds of the weights, and make room for its keys and values."""
    started = time.perf_counter()
    spec, card, sizes = read_spec(options.directory), plan.card, plan.sizes
    ops = _ops(options) if options.timeline is None else TimedOps(_ops(options), options.timeline)
    source, own = _source(options, spec), local_spec(spec, shards.cut)
    weights = load_weights(spec, source, ops, max_len=sizes.max_model_len, cut=shards.cut)
    kv = KvCache.allocate(
        own, num_blocks=sizes.num_blocks, block_size=sizes.block_size, device=ops.device, dtype=ops.dtype
    )
    logger.info(
        "model loaded",
        extra={
            "model": card.name,
            "shard": shards.cut.shard,
            "shards": shards.cut.num_shards,
            "fingerprint": card.fingerprint,
            "experts": weights.experts_how,
            "max_model_len": sizes.max_model_len,
            "longest_exact": spec.max_exact_len,
            "kv_blocks": sizes.num_blocks,
            "kv_block_tokens": sizes.block_size,
            "kv_bytes": sizes.kv_bytes,
            "seconds": round(time.perf_counter() - started, 2),
        },
    )
    return LoadedModel(Decoder(own, weights, ops, kv, shards), spec, card, sizes, source)


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
    return TorchOps(torch.device(options.device), activation_dtype(options))


def activation_dtype(options: ModelOptions) -> torch.dtype:
    """Of activations, keys and values: a CPU computes in fp32 whatever it keeps."""
    return torch.float32 if options.device == "cpu" or options.dtype == "fp32" else torch.bfloat16


def _source(options: ModelOptions, spec: ModelSpec) -> TensorSource:
    return RandomTensors(spec) if options.load_format == "dummy" else Checkpoint(options.directory, spec)
