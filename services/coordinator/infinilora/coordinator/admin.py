"""What operators do by hand: the leader does it, any other coordinator has it done by the leader.

Every act is noted in the audit in one step with what it changes, under the leader's epoch; what it orders of others
is noted before it is ordered.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, assert_never

import msgspec

from infinilora.coordinator.audit import Audit, now
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.rebalance import MAX_SHOWN, Difference
from infinilora.coordinator.reconcile import Reconciler
from infinilora.protocol import keys, subjects
from infinilora.protocol.adapter import AdapterRecord
from infinilora.protocol.admin import (
    AdminReply,
    AdminRequest,
    DrainMember,
    EvictAdapter,
    Freeze,
    Frozen,
    PinAdapter,
    Rebalance,
    Scale,
)
from infinilora.protocol.control import AdapterEvent, Evict, GroupLoad
from infinilora.protocol.errors import AdapterNotFound, Conflict, InvalidRequest, Unavailable
from infinilora.protocol.ids import DEFAULT_TENANT, Digest, Fingerprint, check_name, parse_digest
from infinilora.protocol.scale import TierName, by_hand, check_tier
from infinilora.runtime.bus import Bus
from infinilora.runtime.membership import Member
from infinilora.runtime.store import Change, Stamp, Store, Value

MAX_COUNT = 1000
"""Of engines or groups of one base, by hand: more is a slip of the hand, whatever is forced."""
ACT_S = 30.0
"""For the leader's answer to another coordinator: a plan of a large fleet takes seconds."""


class Admin:
    """Takes acts whose caller is known. Raises one of our errors for what cannot be done, and has done nothing then."""

    def __init__(
        self,
        *,
        store: Store,
        bus: Bus,
        leadership: Leadership,
        reconciler: Reconciler,
        audit: Audit,
        models: Callable[[], Mapping[Fingerprint, str]],
        ceilings: Mapping[TierName, int],
        follows: str,
    ) -> None:
        """`models`: the served names of the bases that are here, or are scaled to nothing.

        `ceilings`: how many engines and groups of one base there may be, unless an operator forces more. `follows`:
        who carries counts out, as the settings name it.
        """
        self._store = store
        self._bus = bus
        self._leadership = leadership
        self._reconciler = reconciler
        self._audit = audit
        self._models = models
        self._ceilings = ceilings
        self._follows = follows

    async def do(self, request: AdminRequest) -> AdminReply:
        """Here if this process leads, else where the leader is."""
        if self._leadership.is_leading:
            return await self.obey(request)
        leader = self._leadership.leader
        if leader is None:
            raise Unavailable("no coordinator leads now; one will in a moment", retry_after_s=1.0)
        return await self._bus.request(subjects.admin(leader.partition("/")[0]), request, AdminReply, timeout_s=ACT_S)

    async def obey(self, request: AdminRequest) -> AdminReply:
        """As the leader. Raises Unavailable where it is not."""
        epoch = self._leadership.holding
        if epoch is None:
            raise Unavailable("this coordinator does not lead any more; another will in a moment", retry_after_s=1.0)
        match request.act:
            case PinAdapter() as act:
                result = await self._pin(act, request, epoch)
            case EvictAdapter() as act:
                result = await self._evict(act, request, epoch)
            case DrainMember() as act:
                result = await self._drain(act, request, epoch)
            case Freeze() as act:
                result = await self._freeze(act, request, epoch)
            case Rebalance() as act:
                result = await self._rebalance(act, request, epoch)
            case Scale() as act:
                result = await self._scale(act, request, epoch)
            case _:
                assert_never(request.act)
        self._reconciler.look_again()
        return AdminReply(result={"act": msgspec.to_builtins(request.act), "epoch": epoch, **result})

    async def _pin(self, act: PinAdapter, request: AdminRequest, epoch: int) -> dict[str, Any]:
        found = await self._record(act.adapter)
        record = found.value
        shown = {"adapter": f"{record.tenant}/{record.name}", "digest": record.current}
        if record.pinned == act.pinned:
            await self._audit.write(request, epoch)
            return {**shown, "changed": False}
        pinned = msgspec.structs.replace(record, pinned=act.pinned, revision=record.revision + 1)
        entry = keys.adapter_entry(record.tenant, record.name)
        swap = await self._audit.write(
            request,
            epoch,
            [Change(keys.adapter(record.tenant, record.name), found.raw, pinned)],
            [Stamp(keys.REGISTRY_JOURNAL, entry, keys.REGISTRY_REVISION)],
        )
        event = AdapterEvent(
            action="put", tenant=record.tenant, name=record.name, revision=swap.counters[0], digest=record.current
        )
        await self._bus.publish(subjects.ADAPTER_EVENTS, event)
        return {**shown, "changed": True}

    async def _evict(self, act: EvictAdapter, request: AdminRequest, epoch: int) -> dict[str, Any]:
        digests = await self._digests(act.adapter)
        groups = self._reconciler.heads()
        if act.group and act.group not in groups:
            raise InvalidRequest(f"no group {act.group!r} is there; found {_names(groups)}", param="group")
        await self._audit.write(request, epoch)
        asked = {name: server for name, server in groups.items() if act.group in ("", name)}
        orders = [(n, server, d) for n, server in sorted(asked.items()) for d in sorted(digests & _resident(server))]
        give = self._reconciler.orders.give
        outcomes = await asyncio.gather(*(give(server, Evict(digest=digest), epoch) for _, server, digest in orders))
        told = zip(orders, outcomes, strict=True)
        return {"orders": [{"group": n, "digest": digest, "outcome": outcome} for (n, _, digest), outcome in told]}

    async def _drain(self, act: DrainMember, request: AdminRequest, epoch: int) -> dict[str, Any]:
        drains, name = self._reconciler.drains, act.member
        groups, engines = self._reconciler.heads(), self._reconciler.engines()
        if name in groups and name in engines:
            raise Conflict(f"{name!r} is the name of a group and of an engine; rename one", param="member")
        if act.draining and name not in groups and name not in engines:
            told = f"groups: {_names(groups)}; engines: {_names(engines)}"
            raise InvalidRequest(f"no group or engine {name!r} is there; found {told}", param="member")
        await self._reconciler.look_at_drains()
        is_draining = name in drains.by_hand
        if not act.draining and not is_draining and name in drains.by_scale:
            raise Conflict(f"{name!r} goes as fewer are wanted; `scale` says how many there are to be", param="member")
        if not act.draining and not is_draining:
            raise InvalidRequest(f"{name!r} was not told to drain; found {_names(drains.by_hand)}", param="member")
        await self._audit.write(request, epoch, [await drains.change(name, draining=act.draining)])
        await self._reconciler.look_at_drains()
        others = _others(name, groups if name in groups else engines, drains.wanted)
        return {"member": name, "changed": is_draining != act.draining, "others": others}

    async def _freeze(self, act: Freeze, request: AdminRequest, epoch: int) -> dict[str, Any]:
        found = await self._store.get(keys.FREEZE, Frozen)
        change = Change(keys.FREEZE, found.raw if found else None, None)
        if act.frozen:
            change = change._replace(value=Frozen(who=request.who, at=now(), reason=request.reason))
        await self._audit.write(request, epoch, [change] if act.frozen or found else [])
        return {"changed": act.frozen != (found is not None)}

    async def _rebalance(self, act: Rebalance, request: AdminRequest, epoch: int) -> dict[str, Any]:
        frozen = await self._store.get(keys.FREEZE, Frozen)
        if frozen and not act.dry_run:
            who, at = frozen.value.who, frozen.value.at
            raise Conflict(f"{who} froze the fleet at {at}; unfreeze it first, or ask for a dry run")
        found = await self._reconciler.differences(afresh=act.fresh)
        if not act.dry_run:
            await self._audit.write(request, epoch)
            self._reconciler.look_again(afresh=act.fresh)
        names, models = self._reconciler.registry.names(), self._models()
        shown = [{"model": models.get(base, ""), **_shown(base, changes, names)} for base, changes in found.items()]
        return {"bases": shown}

    async def _scale(self, act: Scale, request: AdminRequest, epoch: int) -> dict[str, Any]:
        tier, known = check_tier(act.tier), set(self._models().values())
        model = act.model or (min(known) if len(known) == 1 else "")
        if model not in known:
            raise InvalidRequest(f"no base model {act.model!r} is known here; found {_names(known)}", param="model")
        if act.count is not None and not 0 <= act.count <= MAX_COUNT:
            raise InvalidRequest(f"count is {act.count}; wanted 0 to {MAX_COUNT}, or none", param="count")
        if act.count is not None and act.count > self._ceilings[tier] and not act.force:
            most = f"at most {self._ceilings[tier]}, the coordinator's max_{tier}"
            raise InvalidRequest(f"count is {act.count}; wanted {most}, or to be forced", param="count")
        is_frozen = await self._store.get(keys.FREEZE, Frozen) is not None
        found = await self._store.get(keys.SCALE, dict[str, int])
        before, name = (found.value if found else {}), by_hand(tier, model)
        after = {key: count for key, count in before.items() if key != name}
        if act.count is not None:
            after[name] = act.count
        await self._audit.write(request, epoch, [Change(keys.SCALE, found.raw if found else None, after)])
        carried_out = {"follows": self._follows, "frozen": is_frozen}
        return {"tier": tier, "model": model, "count": act.count, "changed": after != before, **carried_out}

    async def _record(self, name: str) -> Value[AdapterRecord]:
        """Of `name` or `tenant/name`."""
        tenant, _, short = name.rpartition("/")
        tenant = check_name(tenant, "tenant") if tenant else DEFAULT_TENANT
        found = await self._store.get(keys.adapter(tenant, check_name(short)), AdapterRecord)
        if found is None:
            raise AdapterNotFound(f"adapter '{tenant}/{short}' does not exist", param="adapter")
        return found

    async def _digests(self, name: str) -> frozenset[Digest]:
        """Every version of a name; or the digest that was given, whatever names lead to it."""
        if name.startswith("sha256:"):
            return frozenset({parse_digest(name)})
        record = (await self._record(name)).value
        return frozenset(version.digest for version in record.versions)


def _resident(server: Member) -> frozenset[Digest]:
    load = server.beat.load
    return frozenset(load.resident) if isinstance(load, GroupLoad) else frozenset()


def _others(name: str, alike: Mapping[str, Member], draining: frozenset[str]) -> int:
    """How many take the same work, of the same base, and are not to drain."""
    base = alike[name].beat.base if name in alike else None
    others = (member for other, member in alike.items() if other != name and other not in draining)
    return sum(member.beat.base == base and member.beat.state == "ready" for member in others)


def _names(found: Any) -> str:
    return ", ".join(sorted(found)) or "none"


def _shown(base: str, found: Difference, names: dict[Digest, str]) -> dict[str, Any]:
    plan = [{"name": names.get(home.digest), **home._asdict()} for home in found.plan[:MAX_SHOWN]]
    return {
        "base": base,
        "reasons": found.reasons,
        "num_moves": found.num_moves,
        "num_bytes": found.num_bytes,
        "moves": plan[: found.num_moves],
        "plan": plan,
    }
