"""What every service reads from its environment, once, in `__main__`. The only file of this room that may.

A service declares `class Settings(Common)` with its own fields and calls `read(Settings)`. Addresses and
secrets have no default: `infinilora up`, compose and the chart name them.
"""

import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from infinilora.protocol.errors import InvalidRequest
from infinilora.runtime.credentials import Credentials, From
from infinilora.runtime.listening import parse_address

PREFIX = "INFINILORA_"
LIKENESS = 0.85
"""Of two names, by difflib: one letter too many or too few, and no two settings of different services."""

S = TypeVar("S", bound=BaseSettings)


def _address(value: str) -> str:
    try:
        if value:
            parse_address(value)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    return value


Address = Annotated[str, AfterValidator(_address)]
"""`host:port`, or nothing."""


class Common(BaseSettings):
    """Settings that all services share. Frozen; each is `INFINILORA_<NAME>` in the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    nats_url: str = Field(repr=False)
    """`nats://user:password@host:port`."""
    redis_url: str = Field(repr=False)
    """`redis://:password@host:port/db`."""
    store_url: str
    """`s3://bucket?endpoint=http://host:port&region=us-east-1`, or `file:///directory`. More options of S3: `style`
    (`path`, `virtual`; default by the endpoint), `ca` (a PEM file), `insecure=true` (take any certificate)."""
    s3_access_key: str = ""
    """Of the object store."""
    s3_secret_key: SecretStr = SecretStr("")
    """Belongs to it: both, or neither."""
    s3_session_token: SecretStr = SecretStr("")
    """Of temporary keys."""
    s3_credentials: From = "auto"
    """Where the keys are looked for (credentials.py; docs/operations.md, "The object store")."""
    s3_credentials_file: str = ""
    """A file in the form of ~/.aws/credentials."""
    s3_profile: str = ""
    """A section of that file; empty: `default`."""
    rpc_token: SecretStr = SecretStr("")
    """Shared by all services for gRPC. Empty: anyone who reaches the port may call."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is less than this is not written."""
    otlp_endpoint: str = ""
    """`http://host:4317`. Empty: no tracing."""
    trace_ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of requests traced when the client does not decide."""
    trace_delay_ms: int = Field(default=1000, gt=0)
    """Spans are sent at least this often, in milliseconds."""
    var_dir: Path = Path(".var")
    """Where this process may keep caches and models."""
    beat_ms: int = Field(default=500, gt=0)
    """Milliseconds between two heartbeats. The same number for every process of a cluster."""
    heat_half_lives_s: Annotated[tuple[int, ...], NoDecode] = (10, 60, 600)
    """Seconds, of the adapters' heat. The shortest sees what rises within seconds, the longest what lasts: gateways
    count under all of them, the coordinator reads all. The same for every process of a cluster."""
    memory_bytes: int = Field(default=0, ge=0)
    """What an engine or a LoRA server may hold of this machine's memory; 0: what its control groups and the machine
    allow. The worst that it may have to hold is counted against that when it starts (capacity.py)."""
    drain_s: float = Field(default=10.0, gt=0)
    """After a stop is asked for, how long running work may take to finish."""

    @field_validator("heat_half_lives_s", mode="before")
    @classmethod
    def _half_lives_are_seconds(cls, value: Any) -> Any:
        """Shortest first, whatever order they are given in."""
        given = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        half_lives_s = sorted({int(one) for one in given if str(one).isdecimal()})
        if not half_lives_s or half_lives_s[0] == 0 or not all(str(one).isdecimal() for one in given):
            raise ValueError(f"half-lives are {value!r}; wanted whole seconds, each more than none: 10,60,600")
        return tuple(half_lives_s)

    @property
    def store_credentials(self) -> Credentials:
        """With which keys the object store is opened. Raises InvalidRequest for half a pair."""
        return Credentials(
            access_key=self.s3_access_key,
            secret_key=self.s3_secret_key.get_secret_value(),
            session_token=self.s3_session_token.get_secret_value(),
            source=self.s3_credentials,
            file=self.s3_credentials_file,
            profile=self.s3_profile,
        )


def read(cls: type[S]) -> S:
    """Read the settings, or say on stderr which variables are missing or wrong and exit with status 2.

    A variable that is no setting of this service, and nearly one, is told there too.
    """
    for given, meant in misspelt(cls, os.environ).items():
        sys.stderr.write(f"{given} is no setting of this service; is {meant} meant?\n")
    try:
        return cls()
    except ValidationError as error:
        lines = [_problem(item["loc"], item["msg"]) for item in error.errors()]
        sys.stderr.write("settings are not complete:\n" + "\n".join(lines) + "\n")
        raise SystemExit(2) from None


def misspelt(cls: type[BaseSettings], variables: Iterable[str]) -> dict[str, str]:
    """Variables that may be misspelt settings of `cls`, and what each may mean.

    What is like none of them may be another service's: services may share one environment.
    """
    known = [name.upper() for name in cls.model_fields]
    found: dict[str, str] = {}
    for variable in sorted(variables):
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and name not in known:
            found.update((variable, PREFIX + like) for like in get_close_matches(name, known, 1, LIKENESS))
    return found


def _problem(location: tuple[int | str, ...], message: str) -> str:
    return f"  {PREFIX}{'.'.join(str(part) for part in location).upper()}: {message}"
