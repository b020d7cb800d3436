"""Carries counts out on Kubernetes: the scale subresource of one workload for engines and of one for groups.

The API is the cluster's own (apps/v1, autoscaling/v1 `Scale`): read the present number, and only if it is another one,
merge-patch `spec.replicas`. A service account with `get` and `patch` on `statefulsets/scale` is all that it needs.

The API knows no epochs. So whoever would write asks whether it leads *after* it has read, and what it writes holds for
the version that it has read only: a leader that was stopped in between is refused what another has changed since.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import urllib3

from infinilora.protocol.errors import Internal, InvalidRequest, Unavailable
from infinilora.protocol.scale import TIERS, Desired, TierName, check_tier

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
KINDS = ("statefulsets", "deployments")


class _Replicas(msgspec.Struct):
    replicas: int = 0


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Scale(msgspec.Struct):
    """What we read of an autoscaling/v1 Scale; a count of 0 is left out of it."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Replicas = msgspec.field(default_factory=_Replicas)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the API is, and who we are there. The token is read anew each time: clusters change it within the hour."""

    url: str
    namespace: str
    token_file: Path | None
    ca_file: Path | None


def parse_targets(text: str) -> dict[TierName, str]:
    """`engines=statefulsets/NAME,groups=statefulsets/NAME`; one of them may be missing. Raises InvalidRequest."""
    targets: dict[TierName, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        tier, _, target = part.partition("=")
        kind, _, name = target.strip().partition("/")
        if kind not in KINDS or not name or "/" in name:
            wanted = f"TIER=KIND/NAME with a kind of {', '.join(KINDS)}"
            raise InvalidRequest(f"a scale target is {part[:80]!r}; wanted {wanted}", param="kube_targets")
        targets[check_tier(tier.strip())] = f"{kind}/{name}"
    if not targets:
        raise InvalidRequest("no scale target is named; wanted engines=statefulsets/NAME", param="kube_targets")
    return targets


class KubernetesScaler:
    """The workloads of one base model: a coordinator for several bases on one cluster leaves the others alone."""

    def __init__(self, cluster: Cluster, targets: dict[TierName, str], *, model: str = "") -> None:
        """`model`: the served name that the workloads are of; empty where there is only one base."""
        self._cluster = cluster
        self._targets = targets
        self._model = model
        ca = str(cluster.ca_file) if cluster.ca_file else None
        self._http = urllib3.PoolManager(
            ca_certs=ca, timeout=urllib3.Timeout(total=TIMEOUT_S), retries=False, maxsize=2
        )

    async def apply(self, desired: Desired, leads: Callable[[], bool]) -> None:
        """Raises Unavailable while the API does not answer, or another leads or has written; Internal if it refuses."""
        if self._model in ("", desired.model):
            await asyncio.to_thread(self._apply, desired, leads)

    async def present(self, desired: Desired) -> dict[TierName, int]:
        """Whole groups count: one that lacks a shard is being made, or unmade."""
        if self._model not in ("", desired.model):
            return {}
        found = await asyncio.to_thread(lambda: {tier: self._get(target) for tier, target in self._targets.items()})
        return {tier: scale.spec.replicas // _each(desired, tier) for tier, scale in found.items()}

    def _apply(self, desired: Desired, leads: Callable[[], bool]) -> None:
        for tier in TIERS:
            if tier in self._targets:
                self._set(self._targets[tier], desired.count(tier) * _each(desired, tier), leads)

    def _get(self, target: str) -> _Scale:
        raw = self._ask("GET", target)
        try:
            return msgspec.json.decode(raw, type=_Scale)
        except msgspec.MsgspecError as error:
            raise Internal(f"the Kubernetes API says of {target} what is no Scale: {error}") from error

    def _set(self, target: str, replicas: int, leads: Callable[[], bool]) -> None:
        found = self._get(target)
        if found.spec.replicas == replicas:
            return
        if not leads():
            raise Unavailable(f"{target} is left to whoever leads now", retry_after_s=1.0)
        version = {"resourceVersion": found.metadata.resource_version} if found.metadata.resource_version else {}
        self._ask("PATCH", target, msgspec.json.encode({"metadata": version, "spec": {"replicas": replicas}}))
        logger.info("replicas set", extra={"target": target, "had": found.spec.replicas, "wanted": replicas})

    def _ask(self, method: str, target: str, body: bytes | None = None) -> bytes:
        cluster = self._cluster
        url = f"{cluster.url}/apis/apps/v1/namespaces/{cluster.namespace}/{target}/scale"
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/merge-patch+json"
        try:
            if cluster.token_file:
                headers["authorization"] = f"Bearer {cluster.token_file.read_text().strip()}"
            answer = self._http.request(method, url, body=body, headers=headers)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(f"the Kubernetes API does not answer: {error}", retry_after_s=1.0) from error
        if answer.status >= 500 or answer.status in (409, 429):
            raise Unavailable(f"the Kubernetes API answers {method} {target} with {answer.status}", retry_after_s=1.0)
        if answer.status >= 400:
            raise Internal(
                f"the Kubernetes API refuses {method} {target}/scale with {answer.status}: {answer.data[:200]!r}"
            )
        return answer.data


def _each(desired: Desired, tier: TierName) -> int:
    """Processes of one instance."""
    return desired.group_shards if tier == "groups" else 1
