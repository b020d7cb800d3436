"""Carries counts out on Kubernetes: for each base the scale subresource of a workload of engines and of one of groups.

The API is the cluster's own (apps/v1, autoscaling/v1 `Scale`): read the present number, and only if it is another one,
merge-patch `spec.replicas`. A service account with `get` and `patch` on `statefulsets/scale` is all that it needs.

The API knows no epochs. So whoever would write asks whether it leads *after* it has read, and what it writes holds for
the version that it has read only: a leader that was stopped in between is refused what another has changed since.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import urllib3

from infinilora.protocol.errors import Internal, InvalidRequest, Unavailable
from infinilora.protocol.scale import Desired, TierName, check_tier

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


Targets = Mapping[TierName, str]
"""The workloads of one base, as `kind/name`; one tier may be missing."""


def parse_targets(text: str) -> dict[str, Targets]:
    """Workloads by served name: `model=NAME,engines=statefulsets/NAME,groups=statefulsets/NAME;model=...`.

    A single base may leave its name out, and is told by "". Raises InvalidRequest.
    """
    found: dict[str, Targets] = {}
    for base in filter(None, (base.strip() for base in text.split(";"))):
        model, targets = _parse_base(base)
        if model in found:
            raise _wrong(f"two scale targets are of model {model[:80]!r}; wanted one for each base")
        found[model] = targets
    if not found:
        raise _wrong("no scale target is named; wanted engines=statefulsets/NAME")
    if "" in found and len(found) > 1:
        raise _wrong("a scale target without a model is beside others; wanted model=NAME in each")
    return found


def _parse_base(text: str) -> tuple[str, Targets]:
    model, targets = "", dict[TierName, str]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (side.strip() for side in part.partition("="))
        if key == "model":
            model = value
            continue
        kind, _, name = value.partition("/")
        if kind not in KINDS or not name or "/" in name:
            raise _wrong(f"a scale target is {part[:80]!r}; wanted TIER=KIND/NAME with a kind of {', '.join(KINDS)}")
        targets[check_tier(key)] = value
    if not targets:
        raise _wrong(f"no scale target is named for model {model[:80]!r}; wanted engines=statefulsets/NAME")
    return model, targets


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="kube_targets")


class KubernetesScaler:
    """The workloads that were named; a base that none was named of is left alone."""

    def __init__(self, cluster: Cluster, targets: Mapping[str, Targets]) -> None:
        """`targets`: as parse_targets has them."""
        self._cluster = cluster
        self._targets = targets
        ca = str(cluster.ca_file) if cluster.ca_file else None
        self._http = urllib3.PoolManager(
            ca_certs=ca, timeout=urllib3.Timeout(total=TIMEOUT_S), retries=False, maxsize=2
        )

    async def apply(self, desired: Desired, leads: Callable[[], bool]) -> None:
        """Raises Unavailable while the API does not answer, or another leads or has written; Internal if it refuses."""
        await asyncio.to_thread(self._apply, desired, leads)

    async def present(self, desired: Desired) -> dict[TierName, int]:
        """Whole groups count: one that lacks a shard is being made, or unmade."""
        targets = self._of(desired)
        found = await asyncio.to_thread(lambda: {tier: self._get(target) for tier, target in targets.items()})
        return {tier: scale.spec.replicas // _each(desired, tier) for tier, scale in found.items()}

    def _of(self, desired: Desired) -> Targets:
        return self._targets.get("") or self._targets.get(desired.model, {})

    def _apply(self, desired: Desired, leads: Callable[[], bool]) -> None:
        for tier, target in self._of(desired).items():
            self._set(target, desired.count(tier) * _each(desired, tier), leads)

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
