"""What can be asked for: base models by served name or alias, adapters by name and version.

Joins what the fleet serves with what the registry holds. A name that is both a base model's and an adapter's
is refused rather than guessed at.
"""

from typing import NamedTuple

import msgspec

from infinilora.gateway.fleet import Fleet
from infinilora.gateway.mirror import Entry
from infinilora.gateway.names import AdapterRef, BaseRef, parse_model, parse_target
from infinilora.gateway.plan import Target
from infinilora.gateway.registry import Registry
from infinilora.gateway.states import State, States
from infinilora.gateway.versions import current_version, version_of
from infinilora.protocol.adapter import FINGERPRINT_VERSION, AdapterRecord, AliasRecord, BaseCard, VersionRecord
from infinilora.protocol.errors import (
    AdapterForbidden,
    AdapterInvalid,
    AdapterNotFound,
    Conflict,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from infinilora.protocol.ids import Fingerprint, check_name


class BaseEntry(msgspec.Struct, frozen=True):
    """A base model under one of its names."""

    name: str
    base: Fingerprint
    state: State


class Found(NamedTuple):
    """What a name means: an adapter, one of its versions, and the alias that the name is, if it is one."""

    record: AdapterRecord
    version: VersionRecord
    alias: AliasRecord | None = None


class Catalog:
    """Answers from memory; raises the error a client should see.

    `aliases` are those of base models. Where `is_open`, nobody shows a key and everybody may name any tenant.
    """

    def __init__(self, fleet: Fleet, registry: Registry, aliases: dict[str, str], *, is_open: bool = False) -> None:
        self._fleet = fleet
        self._registry = registry
        self._aliases = aliases
        self._is_open = is_open

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
                self._check_informed()
                raise ModelNotFound(f"base model '{name[:80]}' is not served", param="base")
            return base
        self._check_informed()  # the only one so far may not be the only one
        known = {base: model for model, base in (self._fleet.served() or self._fleet.known()).items()}
        if len(known) > 1:
            names = ", ".join(sorted(known.values()))
            raise InvalidRequest(f"several base models are served ({names}); name one in 'base'", param="base")
        return next(iter(known))

    def known_bases(self) -> dict[str, Fingerprint | None]:
        """Every name of a base model; None where an alias is of one that has not been met."""
        known = self._fleet.known()
        return {**{alias: known.get(name) for alias, name in self._aliases.items()}, **known}

    def served_bases(self) -> list[BaseEntry]:
        served = self._fleet.served()
        aliases = {alias: served[name] for alias, name in self._aliases.items() if name in served}
        return [BaseEntry(name, base, self._fleet.state(base)) for name, base in sorted((aliases | served).items())]

    def _base(self, name: str) -> Fingerprint | None:
        """By a name that an engine serves, else by an alias: what is served under its own name stays what it is."""
        known = self._fleet.known()
        return known.get(name) or known.get(self._aliases.get(name, ""))

    # Names

    def resolve(self, model: str, tenant: str) -> Target:
        """What `model` means for this tenant, bound to a digest. Raises 400, 404, 409; 503 while little is known."""
        if not model:
            raise InvalidRequest("model is empty", param="model")
        if (base := self._base(model)) is not None:
            if self._registry.get(tenant, model) or self._registry.alias(tenant, model):
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

    def check_base(self, target: Target, card: BaseCard) -> None:
        """Raise AdapterInvalid for an adapter of a base that no engine will ever have again.

        Engines that sampled their weights gave unlike bases one fingerprint, so nobody can tell by it which of today's
        an adapter was proven for. It is served as long as such an engine is alive.
        """
        is_outdated = card.fingerprint_version < FINGERPRINT_VERSION
        if target.digest is None or not is_outdated or target.base in self._fleet.served().values():
            return
        raise AdapterInvalid(
            f"adapter '{target.name}' was registered for base model '{card.name}' by a fingerprint of version "
            f"{card.fingerprint_version}, which does not cover all weights; wanted {FINGERPRINT_VERSION}: delete it "
            "and register it again",
            param="model",
        )

    def find(self, tenant: str, name: str) -> Found:
        """An adapter, also by an alias. Raises AdapterNotFound."""
        found = self._look_up(tenant, AdapterRef(None, name, None, None), param="name")
        if found is None:
            raise AdapterNotFound(f"adapter '{name[:80]}' does not exist", param="name")
        return found

    def check_tenant(self, tenant: str, wanted: str | None) -> str:
        """The tenant that a caller of `tenant` acts for, who may have named one."""
        if wanted in (None, tenant) or (self._is_open and check_name(wanted or "", "tenant")):
            return wanted or tenant
        raise AdapterForbidden(f"this key is of another tenant than {wanted[:80]!r}", param="tenant")

    def _adapter(self, model: str, ref: AdapterRef, tenant: str) -> Target:
        is_theirs = self._is_open or ref.tenant in (None, tenant)
        found = self._look_up(ref.tenant or tenant, ref, param="model") if is_theirs else None
        if found is None:
            self._check_informed()
            raise AdapterNotFound(f"model '{model[:120]}' does not exist, or you may not use it", param="model")
        return Target(
            requested=model,
            base=found.record.base,
            digest=found.version.digest,
            tenant=found.record.tenant,
            name=found.record.name,
            allows_base=found.record.fallback == "base",
        )

    def _look_up(self, tenant: str, ref: AdapterRef, *, param: str) -> Found | None:
        record = self._registry.get(tenant, ref.name)
        if record is not None:
            return Found(record, version_of(record, ref, param=param))
        alias = self._registry.alias(tenant, ref.name)
        if alias is None:
            return None
        if ref.selector:
            raise InvalidRequest(
                f"'{ref.name}' is an alias of '{alias.target}'; a version is asked of the adapter itself", param=param
            )
        return self.meaning(alias)

    def meaning(self, alias: AliasRecord) -> Found | None:
        """What an alias points to; None for a moment while that is being deleted, or made anew."""
        ref = parse_target(alias.target, alias.tenant)
        record = self._registry.get(alias.tenant, ref.name)
        try:
            return Found(record, version_of(record, ref, param="model"), alias) if record else None
        except AdapterNotFound:
            return None

    def _check_informed(self) -> None:
        """A name is only unknown once the registry has been read and every engine been heard."""
        if not self._registry.is_loaded:
            raise Unavailable("the adapter registry has not been read yet", retry_after_s=1.0)
        if not self._fleet.is_informed:
            raise Unavailable("not every base model is known yet; is an engine running?", retry_after_s=2.0)

    # Adapters

    def page(self, tenant: str, after: str, limit: int) -> list[Found]:
        """Adapters after a name, by name."""
        return self._meanings(self._registry.page(tenant, after, limit))

    def usable(self, tenant: str, after: str, limit: int) -> list[Found]:
        """Adapters and aliases after a name that would be served now: an engine of their base is alive."""
        served = frozenset(self._fleet.served().values())
        return self._meanings(self._registry.page(tenant, after, limit, bases=served))

    def _meanings(self, entries: list[Entry]) -> list[Found]:
        found = (
            self.meaning(entry) if isinstance(entry, AliasRecord) else Found(entry, current_version(entry))
            for entry in entries
        )
        return [each for each in found if each is not None]

    def states(self) -> States:
        """How they fare now."""
        return self._fleet.states()
