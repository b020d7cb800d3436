"""What an engine reads from its environment, each as `INFINILORA_<NAME>`. Read once, in `__main__`."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from infinilora.pool.backoff import RETRY_S
from infinilora.runtime.settings import Address, Common
from infinilora.runtime.watchdog import limit_s

LEAST_POOL_BYTES = 1 << 16


class Settings(Common):
    """Memory and limits of one engine; what is 0 or empty is derived at start, and logged."""

    model: Path
    """A Hugging Face model directory."""
    served_name: str = ""
    """What clients call the base model; the directory's name if empty."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`auto`: what the directory holds. `dummy`: random weights of the true shapes, for measurements."""
    engine_id: str = "engine-0"
    """Its name in beats, commands and metrics; one of its own for each engine of a cluster."""
    listen: Address = "127.0.0.1:0"
    """host:port of its gRPC; port 0 takes a free one."""
    advertise: Address = ""
    """The address that others are told; that of `listen` if empty."""
    metrics_listen: Address = ""
    """`host:port` for Prometheus; empty: no metrics."""

    device: Literal["cpu", "cuda"] = "cpu"
    """What it computes on. `cuda` is untested on hardware."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """How weights are kept. `auto`: fp32 on the CPU, bf16 on CUDA. A CPU computes in fp32 whatever it keeps."""
    threads: int = Field(default=2, ge=1)
    """Cores that a step may use, of all its shards together."""
    engine_shards: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Processes of this engine, each with its part of the model (decision 0008): on CUDA, each on a device of its own.
    `auto`: as few as hold it; on a CPU one."""
    kv_bytes: int = Field(default=0, ge=0)
    """Memory for keys and values, of each shard; 0: enough for `max_running` sequences of a quarter of the longest, at
    most 2 GiB."""
    kv_block: int = Field(default=16, ge=1)
    """Tokens in a block."""
    max_model_len: int = Field(default=0, ge=0)
    """0: what the model computes exactly, at most 8192."""
    max_running: int = Field(default=64, ge=1)
    """Sequences in the batch at most."""
    max_waiting: int = Field(default=256, ge=1)
    """Sequences that wait for their first step at most; the next one is answered `overloaded`."""
    step_tokens: int = Field(default=512, ge=1)
    """Rows of one step at most: long prompts are cut into chunks of this."""
    tpot_ms: int = Field(default=100, ge=0)
    """What a step may take while somebody decodes: its rows follow what was measured. 0: always `step_tokens`."""
    min_step_tokens: int = Field(default=64, ge=1)
    """Rows of a step, besides those that decode, however little time `tpot_ms` leaves."""
    max_bypass: int = Field(default=256, ge=1)
    """How often a sequence that waits for a slot is passed by later ones."""
    facts_mb: int = Field(default=4096, ge=1)
    """Of one request for facts of the base, which lies on disk under `var_dir` while it is answered."""

    step_limit_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """A step that gets no layer further for so long is stuck: the engine ends itself, to be started again. 0: 8 s on a
    CPU; 60 s on CUDA, whose first steps compile kernels."""

    ping_pong: Literal["", "off", "auto", "on"] = ""
    """Rows of a step in two halves that take turns, one computing while the other waits for deltas. `auto`: where it
    was measured to pay. Empty: `auto` on CUDA, `off` on a CPU, whose LoRA server shares its cores."""

    lora: Literal["remote", "local", "none"] = "remote"
    """Who computes deltas: LoRA servers, this engine with a pool of its own, or nobody (base only)."""
    link_backends: Annotated[tuple[Literal["cuda", "shm", "rdma", "tcp"], ...], NoDecode] = ("cuda", "shm", "tcp")
    """Which links are offered: `cuda` first, where `device` is one. `rdma` needs the package nixl. Both are untested on
    hardware."""
    link_dir: Path | None = None
    """A directory (tmpfs) that LoRA servers of this host see too; not set: no `shm`."""
    link_buffers: int = Field(default=32, ge=2)
    """Of each direction of a link to a LoRA server."""
    link_buffer_bytes: int = Field(default=256 << 10, ge=4096)
    """One of them. Both are the LoRA server's to decide; an engine counts its memory by its own."""
    link_narrowing: Literal["never", "load", "always"] = "never"
    """Over `tcp` and `rdma`, send activations and deltas as eight-bit integers (bounds: docs/links.md): `load` where
    more than `link_narrow_limit_bytes` are on their way at once, or `always`. `never` is exact."""
    link_narrow_limit_bytes: int = Field(default=256 << 10, ge=0)
    """More than this on their way at once is what `load` means."""
    pool_bytes: int = Field(default=1 << 30, ge=LEAST_POOL_BYTES)
    """`local` mode: memory for adapters, at their true ranks."""
    pool_slots: int = Field(default=1024, ge=1)
    """`local` mode: adapters in the pool at most."""
    host_bytes: int = Field(default=0, ge=0)
    """`local` mode: memory of this machine for whole adapters, between the device's and the disk, pinned where there is
    a CUDA device. 0: none, which on a CPU is best."""
    cache_bytes: int = Field(default=4 << 30, ge=0)
    """`local` mode: packed files on the local disk, under `var_dir`."""
    load_share: float = Field(default=0.03, gt=0, le=1)
    """Where this process has a pool: of one core, for all loads together, while rows of adapters in it are served."""
    load_retry_s: float = Field(default=RETRY_S, gt=0, allow_inf_nan=False)
    """Where this process has a pool: how long an adapter that could not be loaded is left alone; the pause doubles
    while it goes on failing, up to twenty times this."""
    hybrid_bytes: int = Field(default=0, ge=0)
    """`remote` mode: memory of this engine for its hottest adapters, which are then computed here (decision 0007); with
    `pool_slots`, `host_bytes` and `cache_bytes` as in `local` mode. 0: none, all are computed by LoRA servers."""
    loading_patience_s: float = Field(default=30.0, gt=0)
    """A request whose adapter is not ready by then gets `adapter_loading`."""
    lost_patience_s: float = Field(default=1.5, gt=0)
    """A running request that lost its adapter for so long gets `adapter_failed`."""

    timeline: Path | None = None
    """Where a timeline of all steps is written when the engine ends (timeline.py). For measurements only."""

    @field_validator("hybrid_bytes")
    @classmethod
    def _is_none_or_a_pool(cls, value: int) -> int:
        if 0 < value < LEAST_POOL_BYTES:
            raise ValueError(f"found {value}; wanted 0, or at least {LEAST_POOL_BYTES}")
        return value

    @field_validator("timeline")
    @classmethod
    def _can_be_written(cls, value: Path | None) -> Path | None:
        """Told now: it is written when the engine ends."""
        if value is not None and not value.absolute().parent.is_dir():
            raise ValueError(f"found no directory {value.absolute().parent}; wanted one to write {value.name} to")
        return value

    @property
    def step_limit(self) -> float:
        return limit_s(self.step_limit_s, self.device)

    @property
    def ping_pong_mode(self) -> Literal["off", "auto", "on"]:
        return self.ping_pong or ("auto" if self.device == "cuda" else "off")

    @field_validator("link_backends", mode="before")
    @classmethod
    def _comma_list(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def of_shard(settings: Settings, shard: int) -> Settings:
    """The settings of another shard than the head: with a name and a directory of its own."""
    name = f"{settings.engine_id}.{shard}"
    return settings.model_copy(update={"engine_id": name, "var_dir": settings.var_dir / name})


def shard_env(settings: Settings, shard: int) -> dict[str, str]:
    """The environment of another shard's process. On CUDA it sees one device, its own; the head uses the first."""
    if settings.device == "cpu":
        return dict(os.environ)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = visible.split(",")[shard] if visible else str(shard)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": device}
