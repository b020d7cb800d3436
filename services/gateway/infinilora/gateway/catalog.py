"""What can be asked for: base models by served name or alias, adapters by name and version.

Joins what the fleet serves with what the registry holds. A name that is both a base model's and an adapter's
is refused rather than guessed at.
"""

import msgspec

from infinilora.gateway.fleet import Fleet
from infinilora.gateway.names import AdapterRef, BaseRef, parse_model
from infinilora.gateway.plan import Target
from infinilora.gateway.registry import Registry
from infinilora.protocol.adapter import AdapterRecord, VersionRecord
from infinilora.protocol.errors import (
    AdapterNotFound,
    Conflict,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from infinilora.protocol.ids import Digest, Fingerprint


class BaseEntry(msgspec.Struct, frozen=True):
    """A base model under one of its names."""

    name: str
    base: Fingerprint


class Catalog:
    """Answers from memory; raises the error a client should see."""

    def __init__(self, fleet: Fleet, registry: Registry, aliases: dict[str, str]) -> None:
        self._fleet = fleet
        self._registry = registry
        self._aliases = aliases

    # Base models

    def is_base(self, name: str) -> bool:
        return self._base(name) is not None or name in self._aliases

    def check_free(self, name: str) -> None:
        if self.is_base(name):
            raise Conflict(f"'{name}' is the name of a base model; choose another", param="name")

    def base_name(self, base: Fingerprint) -> str:
        """The served name of a base; its fingerprint when it has not been met since the start."""
        return next((name for name, known in self._fleet.known().items() if known == base), base)

    def base_for_adapter(self, name: str | None) -> Fingerprint:
        """The base an adapter is for: the one that is named, or the only one there is."""
        if name is not None:
            base = self._base(name)
            if base is None:
                raise ModelNotFound(f"base model '{name[:80]}' is not served", param="base")
            return base
        known = {base: model for model, base in (self._fleet.served() or self._fleet.known()).items()}
        if not known:
            raise Unavailable("no base model is known yet; is an engine running?", retry_after_s=2.0)
        if len(known) > 1:
            names = ", ".join(sorted(known.values()))
            raise InvalidRequest(f"several base models are served ({names}); name one in 'base'", param="base")
        return next(iter(known))

    def served_bases(self) -> list[BaseEntry]:
        served = self._fleet.served()
        aliases = {alias: served[name] for alias, name in self._aliases.items() if name in served}
        return [BaseEntry(name, base) for name, base in sorted((served | aliases).items())]

    def _base(self, name: str) -> Fingerprint | None:
        return self._fleet.known().get(self._aliases.get(name, name))

    # Names

    def resolve(self, model: str, tenant: str) -> Target:
        """What `model` means for this tenant, bound to a digest. Raises 400, 404, 409; 503 while little is known."""
        if not model:
            raise InvalidRequest("model is empty", param="model")
        if (base := self._base(model)) is not None:
            if self._registry.get(tenant, model) is not None:
                raise Conflict(
                    f"'{model}' names a base model and an adapter; use 'base:{model}' or '{model}@v1'",
                    param="model",
                )
            return Target(requested=model, base=base)
        ref = parse_model(model)
        if isinstance(ref, BaseRef):
            base = self._base(ref.name)
            if base is None:
                self._check_informed()
                raise ModelNotFound(f"base model '{ref.name[:80]}' is not served", param="model")
            return Target(requested=model, base=base)
        return self._adapter(model, ref, tenant)

    def find(self, tenant: str, name: str) -> AdapterRecord:
        record = self._registry.get(tenant, name)
        if record is None:
            raise AdapterNotFound(f"adapter '{name[:80]}' does not exist", param="name")
        return record

    def _adapter(self, model: str, ref: AdapterRef, tenant: str) -> Target:
        record = self._registry.get(tenant, ref.name) if ref.tenant in (None, tenant) else None
        if record is None:
            self._check_informed()
            raise AdapterNotFound(f"model '{model[:120]}' does not exist, or you may not use it", param="model")
        return Target(
            requested=model,
            base=record.base,
            digest=_version(record, ref, model),
            tenant=record.tenant,
            name=record.name,
            allows_base=record.fallback == "base",
        )

    def _check_informed(self) -> None:
        """A name is only unknown once the registry has been read and an engine been heard."""
        if not self._registry.is_loaded:
            raise Unavailable("the adapter registry has not been read yet", retry_after_s=1.0)
        if not self._fleet.known():
            raise Unavailable("no base model is known yet; is an engine running?", retry_after_s=2.0)

    # Adapters

    def adapters(self, tenant: str) -> list[AdapterRecord]:
        return self._registry.of_tenant(tenant)

    def usable_adapters(self, tenant: str) -> list[AdapterRecord]:
        """Those that would be served now: an engine of their base is alive."""
        served = set(self._fleet.served().values())
        return [record for record in self._registry.of_tenant(tenant) if record.base in served]

    def state(self, digest: Digest) -> str:
        """`resident`: some LoRA server or engine holds it now. `registered`: it is fetched when asked for."""
        return "resident" if digest in self._fleet.resident() else "registered"


def current_version(record: AdapterRecord) -> VersionRecord:
    return next(version for version in record.versions if version.digest == record.current)


def _version(record: AdapterRecord, ref: AdapterRef, model: str) -> Digest:
    if ref.version is None and ref.digest is None:
        return record.current
    for version in record.versions:
        if ref.digest == version.digest or ref.version == version.version:
            return version.digest
    raise AdapterNotFound(f"model '{model[:120]}' does not exist: no such version", param="model")
