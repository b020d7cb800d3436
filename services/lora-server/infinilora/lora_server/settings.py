"""What a lora-server reads from its environment, each as `INFINILORA_<NAME>`. Read once, in `__main__`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from infinilora.pool.backoff import RETRY_S
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.shards import HEAD, Shape
from infinilora.runtime.settings import Address, Common
from infinilora.runtime.watchdog import limit_s

MIN_SLOTS, MAX_SLOTS = 16, 1024
BYTES_PER_SLOT = 1 << 20


class Settings(Common):
    """Memory and doors of one shard of a group; what is 0 or empty is derived at start, and logged."""

    group: str = "lora-0"
    """The name of the group, the same for all its shards; one of its own for each group of a cluster."""
    server_id: str = ""
    """The name of this process in beats and commands; the group's if empty, and `GROUP.SHARD` of one that follows."""
    shape: str = "1x1"
    """Of the group: expert_parallel x layer_parallel. One process for each of its shards."""
    shard: int = Field(default=0, ge=0)
    """Which of them this process is; 0 is the head."""
    head: Address = Field(default="", validate_default=True)
    """`host:port` of the head's gRPC, for a shard that is not the head."""
    base: str
    """The base model: its fingerprint (`sha256:...`), or its served name, as an engine that is alive says it; without
    one, the store's only base of that name (base.py)."""
    listen: Address = "127.0.0.1:0"
    """host:port of its gRPC; port 0 takes a free one."""
    advertise: Address = ""
    """The address that others are told; that of `listen` if empty."""
    metrics_listen: Address = ""
    """`host:port` for Prometheus; empty: no metrics."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]+)?)$")] = "cpu"
    """Where adapters lie and deltas are computed: `cpu`, `cuda` (the first) or `cuda:N`, untested on hardware."""
    threads: int = Field(default=2, ge=1)
    """Cores that deltas may use."""
    rows_per_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How fast this shard is told to be, against those of other groups of its base; 0: measured at start (speed.py)."""
    pool_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """Memory for adapters, at their true ranks."""
    num_slots: int = Field(default=0, ge=0)
    """0: one for each MiB of the pool, 16 at least and 1024 at most."""
    host_bytes: int = Field(default=0, ge=0)
    """Memory of this machine for whole adapters, between the pool's and the disk. 0: none, which on a CPU is best: the
    pool is in the same memory."""
    loader_threads: int = Field(default=2, ge=1)
    """That bring adapters from this machine's memory and disk."""
    fetch_threads: int = Field(default=4, ge=1)
    """That bring adapters from the store; most of the time they wait for it."""
    load_share: float = Field(default=0.03, gt=0, le=1)
    """Of one core, for all loads together, while rows of resident adapters are served; a load is stretched to ten
    seconds at most. 1: loads never wait."""
    call_limit_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """A site call that computes for so long is stuck: the process ends itself, to be started again. 0: 8 s on a CPU;
    60 s on CUDA, whose first calls compile kernels."""
    load_retry_s: float = Field(default=RETRY_S, gt=0, allow_inf_nan=False)
    """How long an adapter that could not be loaded is left alone; the pause doubles while it goes on failing, up to
    twenty times this."""
    max_bypass: int = Field(default=16, ge=1)
    """How often a waiting adapter is passed by later ones that fit."""
    age_after_s: float = Field(default=2.0, gt=0)
    """A lease that has waited for so long is passed by nobody any more."""
    max_wait_s: float = Field(default=30.0, gt=0)
    """A lease that could not be granted by then is refused as overloaded."""

    cache_dir: Path | None = None
    """Packed files on a local disk; all processes of a machine may share it. `var_dir/cache` if not set."""
    cache_bytes: int = Field(default=4 << 30, ge=0)
    """Of the whole directory, whoever wrote them. 0: no cache."""

    link_backends: Annotated[tuple[Literal["cuda", "shm", "rdma", "tcp"], ...], NoDecode] = ("cuda", "shm", "tcp")
    """Which links engines may open: `cuda` where `device` is one. `cuda` and `rdma` need `tcp` beside them, `rdma` the
    package nixl; both are untested on hardware."""
    link_dir: Path | None = None
    """A directory (tmpfs) that engines of this host see too; not set: no `shm`."""
    link_host: str = "127.0.0.1"
    """What `tcp` links bind. Engines are told the same; where it is a wildcard (`0.0.0.0`, `::`) the host of
    `advertise`, or this machine's name."""
    link_port: int = Field(default=0, ge=0, le=65535)
    """That `tcp` links bind; 0 takes a free one."""
    link_buffers: int = Field(default=32, ge=2)
    """Of each direction of a link."""
    link_buffer_bytes: int = Field(default=256 << 10, ge=4096)
    """One of them; a call that is larger goes in several, but one row must fit."""

    @field_validator("link_backends", mode="before")
    @classmethod
    def _comma_list(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("link_backends")
    @classmethod
    def _has_headers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "tcp" not in value and (beside := [name for name in ("cuda", "rdma") if name in value]):
            raise ValueError(f"{beside[0]} needs tcp beside it: its headers go over a socket")
        return value

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, value: str) -> str:
        try:
            return str(Shape.parse(value))
        except InvalidRequest as error:
            raise ValueError(error.message) from error

    @field_validator("shard")
    @classmethod
    def _is_of_the_shape(cls, value: int, info: ValidationInfo) -> int:
        num_shards = Shape.parse(info.data.get("shape", "1x1")).num_shards
        if value >= num_shards:
            raise ValueError(f"shard is {value}; a group of this shape has 0 to {num_shards - 1}")
        return value

    @field_validator("head")
    @classmethod
    def _is_for_followers(cls, value: str, info: ValidationInfo) -> str:
        shard = info.data.get("shard", HEAD)
        if bool(value) != (shard != HEAD):
            raise ValueError(f"head is {value!r} for shard {shard}; every shard but 0 needs it, and 0 has none")
        return value

    @property
    def id(self) -> str:
        return self.server_id or (f"{self.group}.{self.shard}" if self.shard else self.group)

    @property
    def call_limit(self) -> float:
        return limit_s(self.call_limit_s, self.device)

    @property
    def slots(self) -> int:
        return self.num_slots or min(MAX_SLOTS, max(MIN_SLOTS, self.pool_bytes // BYTES_PER_SLOT))

    @property
    def cache(self) -> Path:
        return self.cache_dir or self.var_dir / "cache"
