"""The fleet as the CLI and a person with `curl` see it: plain JSON values."""

from typing import Any

import msgspec

from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.reconcile import Reconciler
from infinilora.runtime.members import Members
from infinilora.runtime.membership import Member


def show(members: Members, leadership: Leadership, reconciler: Reconciler, *, me: str) -> dict[str, Any]:
    """One picture of this moment; `leader` is a coordinator's id, or None while nobody leads."""
    names = reconciler.registry.names()
    return {
        "coordinator": me,
        "leader": leadership.leader.partition("/")[0] if leadership.leader else None,
        "is_leading": leadership.is_leading,
        "epoch": leadership.epoch,
        "is_frozen": members.is_frozen,
        "frozen_by": msgspec.to_builtins(reconciler.frozen) if reconciler.frozen else None,
        "drains": sorted(reconciler.drains.wanted),
        "members": [show_member(member) for member in members.all()],
        "placement": {base: msgspec.to_builtins(w.placement) for base, w in reconciler.written.items()},
        "heat": [
            {"digest": digest, "name": names.get(digest), "rps": round(rps, 4)}
            for digest, rps in list(reconciler.heat.items())[:100]
        ],
    }


def show_member(member: Member) -> dict[str, Any]:
    beat: dict[str, Any] = msgspec.to_builtins(member.beat)
    load = beat.pop("load")
    if load:
        load.pop("type", None)
    return {**beat, "load": load, "health": member.health}
