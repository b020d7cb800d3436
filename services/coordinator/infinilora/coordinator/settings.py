"""What the coordinator reads from its environment, besides the settings that all services share."""

import os
import socket

from pydantic import Field, SecretStr, field_validator

from infinilora.runtime.bearers import parse_keys
from infinilora.runtime.settings import Common


class Settings(Common):
    """`INFINILORA_<NAME>`. The policies get plain values, never this."""

    coordinator_id: str = f"coordinator-{socket.gethostname()}-{os.getpid()}"
    listen: str = "127.0.0.1:8001"
    """host:port of health, metrics and the fleet as JSON; port 0 takes a free one."""
    advertise: str = ""
    """The address that others are told; that of `listen` if empty."""

    admin_keys: SecretStr = SecretStr("")
    """`key:operator,key:operator`: who may use the admin API, and how the audit names them. Empty: it is off."""

    lease_s: float = Field(default=3.0, gt=0)
    """A leader that does not renew for so long is no leader; a standby takes over a moment later."""
    reconcile_s: float = Field(default=1.0, gt=0)
    hot_rps: float = Field(default=2.0, gt=0)
    """For each so many requests per second an adapter is placed on one group more."""
    fill: float = Field(default=0.9, gt=0, le=1)
    """Share of a group's bytes that placement plans with; the rest is for what arrives unplanned."""
    max_hints: int = Field(default=4, ge=0)
    """Stagings that one group is asked for at a time, at most."""
    move_s: float = Field(default=30.0, gt=0)
    """A group that does not hold an adapter so long after it was asked to has failed at it: the adapter stays where it
    is, and the group is not asked again for ten times as long."""
    hint_pause_s: float = Field(default=10.0, gt=0)
    """Before the same hint is given again."""
    delete_grace_s: float = Field(default=15.0, ge=0)
    """How long an adapter that no name leads to is kept in the store for requests that were admitted before."""
    clock_skew_s: float = Field(default=50.0, ge=0)
    """How far the object store's clock may be behind. After a change of leaders, what was being deleted cannot be
    registered anew for this long and ten seconds: a deletion of the earlier leader may still be on its way."""

    @field_validator("admin_keys")
    @classmethod
    def _keys_are_readable(cls, value: SecretStr) -> SecretStr:
        parse_keys(value.get_secret_value(), "operator")
        return value
