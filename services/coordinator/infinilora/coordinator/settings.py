"""What the coordinator reads from its environment, besides the settings that all services share."""

import os
import socket
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from infinilora.coordinator.kubernetes import parse_targets
from infinilora.protocol.errors import InvalidRequest
from infinilora.runtime.bearers import parse_keys
from infinilora.runtime.settings import Address, Common


class Settings(Common):
    """`INFINILORA_<NAME>`. The policies get plain values, never this."""

    coordinator_id: str = f"coordinator-{socket.gethostname()}-{os.getpid()}"
    """Its name in beats and in the leader's lease; one of its own for each process."""
    listen: Address = "127.0.0.1:8001"
    """host:port of health, metrics and the fleet as JSON; port 0 takes a free one."""
    advertise: Address = ""
    """The address that others are told; that of `listen` if empty."""

    admin_keys: SecretStr = SecretStr("")
    """`key:operator,key:operator`: who may use the admin API, and how the audit names them. Empty: it is off."""

    lease_s: float = Field(default=3.0, gt=0)
    """A leader that does not renew for so long is no leader; a standby takes over a moment later."""
    reconcile_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at what is and what should be."""
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
    scaler: Literal["none", "local", "kubernetes"] = "none"
    """Who follows the desired counts: nobody here (they are shown, and nothing is drained), `infinilora up`, or the
    scale subresource of the workloads that `kube_targets` names."""
    min_engines: int = Field(default=1, ge=0)
    """Of each base. 0: none once nobody has come for `scale_idle_s`; the first request brings one back."""
    max_engines: int = Field(default=8, ge=1)
    """Of each base."""
    min_groups: int = Field(default=1, ge=0)
    """Of LoRA servers, of each base."""
    max_groups: int = Field(default=8, ge=1)
    """Of each base."""
    engine_sequences: float = Field(default=32, gt=0)
    """Sequences at once that one engine serves within the SLO."""
    group_sequences: float = Field(default=256, gt=0)
    """Of requests with an adapter, those at once that one group computes for within the SLO."""
    scale_utilisation: float = Field(default=1.0, gt=0, le=1)
    """Share of these that counts are planned with. The rest is headroom beside the band of the forecast, for a load
    that rises faster than noise lets anyone see."""
    lead_s: float = Field(default=120.0, gt=0)
    """From the decision for one more engine to its first token: how far ahead is looked."""
    season_s: float = Field(default=86_400.0, gt=0)
    """After which traffic repeats itself, if it does."""
    scale_hold_s: float = Field(default=1200.0, gt=0)
    """Fewer must have been enough for so long before one goes."""
    scale_idle_s: float = Field(default=3600.0, gt=0)
    """Without a request for so long a base may have none, where the least is 0."""
    iar: float = Field(default=0.95, gt=0, lt=1)
    """Share of requests that are to find room for their adapter at once; groups are counted by it."""
    kube_url: str = "https://kubernetes.default.svc"
    """The API server."""
    kube_namespace: str = "default"
    """Where the workloads are."""
    kube_targets: str = ""
    """`engines=statefulsets/NAME,groups=statefulsets/NAME`; of several bases
    `model=SERVED_NAME,engines=...,groups=...;model=...`."""
    kube_token_file: Path | None = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    """With which the API server is asked; read anew for each request."""
    kube_ca_file: Path | None = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
    """Who signed its certificate."""

    slo_ttft_ms: float = Field(default=250.0, gt=0)
    """Within which `interactive` requests are to have their first token; `standard` ones within `slo_ttft_standard_ms`,
    and `batch` ones whenever it may be."""
    slo_ttft_standard_ms: float = Field(default=2000.0, gt=0)
    """The same of `standard` requests."""
    slo_tpot_ms: float = Field(default=100.0, gt=0)
    """For each token after the first; of both classes."""
    slo_target: float = Field(default=0.95, gt=0, lt=1)
    """Share of requests that are to keep it."""
    prefetch_mb_s: float = Field(default=100.0, ge=0)
    """Megabytes a second of one group's staging that prefetch may take; 0: none."""

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

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """What cannot be carried out is said at the start."""
        for tier, least, most in (
            ("engines", self.min_engines, self.max_engines),
            ("groups", self.min_groups, self.max_groups),
        ):
            if least > most:
                raise ValueError(f"min_{tier} is {least} and max_{tier} is {most}; wanted no more than that")
        if self.scaler == "kubernetes":
            try:
                parse_targets(self.kube_targets)
            except InvalidRequest as error:
                raise ValueError(error.message) from None
        return self
