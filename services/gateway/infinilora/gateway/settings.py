"""What the gateway reads from its environment, besides the settings that all services share."""

import os
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from infinilora.gateway.declared import Policy
from infinilora.gateway.ingest import IngestLimits
from infinilora.gateway.names import parse_aliases
from infinilora.gateway.tenants import parse_keys
from infinilora.protocol.ingest import MAX_RANK
from infinilora.runtime.settings import Address, Common


class Settings(Common):
    """`INFINILORA_<NAME>`. Lists are written with commas, directories with colons as in PATH."""

    listen: Address = "127.0.0.1:8000"
    """host:port of the HTTP API; port 0 takes a free one."""
    advertise: Address = ""
    """The address that others are told; that of `listen` if empty."""
    gateway_id: str = f"gateway-{socket.gethostname()}-{os.getpid()}"
    """Its name in beats, metrics and traces; one of its own for each process."""

    api_keys: SecretStr = SecretStr("")
    """`key:tenant,key:tenant`. Empty: no key is asked for, and everybody is the default tenant."""
    model_aliases: str = ""
    """`alias=served-name,...`: other names of base models. A name that some engine serves itself is no alias."""
    adapter_api: Literal["on", "off"] = "on"
    """Off: this gateway serves adapters and neither registers, changes nor lists them."""
    declared_base: Policy = "warn"
    """What to do with an adapter whose own config names another base model that is known here."""
    adapter_roots: str = ""
    """Directories that `file://` sources may lie in. Empty: the working directory and `var_dir`."""
    adapter_buckets: str = ""
    """`bucket` or `bucket/prefix` that `s3://` sources may lie in. Empty: the store's own bucket."""

    max_concurrent_requests: int = Field(default=1024, gt=0)
    """Requests at once, each of n choices counted n times; more are answered 503."""
    max_tenant_requests: int = Field(default=1024, gt=0)
    """Of these, one tenant's; more are answered 429."""
    max_body_mb: int = Field(default=16, gt=0)
    """Of a request that is no upload; a larger one is answered 413."""
    max_upload_mb: int = Field(default=IngestLimits().max_bytes >> 20, gt=0)
    """Of one adapter's files, as sent and unpacked."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """From its arrival to its last token; then it is answered 504, or its stream ends with an error."""
    patience_s: float = Field(default=10.0, ge=0)
    """How long a request looks for an engine that takes it, from its start, and again when it has lost one."""

    max_rank: int = Field(default=MAX_RANK, ge=1, le=1 << 20)
    """The highest LoRA rank that any module of an adapter may have; one with a higher is refused with both numbers."""
    max_ingests: int = Field(default=2, gt=0)
    """Adapters read at once, each in a process of its own; 32 more may wait."""
    ingest_memory_mb: int = Field(default=IngestLimits().memory_mb, gt=0)
    """Of one worker. Files are mapped beside it, so that it need not grow with `max_upload_mb`."""
    ingest_cpu_s: int = Field(default=IngestLimits().cpu_s, gt=0)
    """Seconds of a processor that one worker may take."""
    ingest_wall_s: float = Field(default=IngestLimits().wall_s, gt=0)
    """Seconds of the clock that it may take."""

    @field_validator("api_keys")
    @classmethod
    def _keys_are_readable(cls, value: SecretStr) -> SecretStr:
        parse_keys(value.get_secret_value())
        return value

    @field_validator("model_aliases")
    @classmethod
    def _aliases_are_readable(cls, value: str) -> str:
        parse_aliases(value)
        return value

    @property
    def aliases(self) -> dict[str, str]:
        return parse_aliases(self.model_aliases)

    @property
    def roots(self) -> tuple[Path, ...]:
        named = tuple(Path(root) for root in self.adapter_roots.split(os.pathsep) if root)
        return named or (Path.cwd(), self.var_dir)

    @property
    def buckets(self) -> tuple[str, ...]:
        return tuple(bucket.strip().strip("/") for bucket in self.adapter_buckets.split(",") if bucket.strip())
