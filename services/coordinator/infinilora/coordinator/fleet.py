"""The fleet as the CLI and a person with `curl` see it: plain JSON values."""

from itertools import islice
from typing import Any

import msgspec

from infinilora.coordinator.heat import Heat, drift
from infinilora.coordinator.leader import Leadership
from infinilora.coordinator.reconcile import SHOWN, Reconciler
from infinilora.protocol.ids import Digest
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
            {"digest": digest, "name": names.get(digest), "rps": round(rps, 4), **_show_views(reconciler.heat, digest)}
            for digest, rps in islice(reconciler.heat.recent.items(), SHOWN)
        ],
        "heat_drift": msgspec.to_builtins(reconciler.top_drift()),
    }


def _show_views(heat: Heat, digest: Digest) -> dict[str, Any]:
    """The rate by half-life in seconds, and whether the adapter rises."""
    rates = heat.rates(digest)
    by_half_life = {str(half_life_s): round(rps, 4) for half_life_s, rps in rates.items()}
    return {"rps_by_half_life": by_half_life, "is_rising": drift(digest, rates).is_rising}


def show_member(member: Member) -> dict[str, Any]:
    beat: dict[str, Any] = msgspec.to_builtins(member.beat)
    load = beat.pop("load")
    if load:
        load.pop("type", None)
    return {**beat, "load": load, "health": member.health}
