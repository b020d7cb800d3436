"""What an operator may do by hand, and how it is noted: bodies of the admin API, messages to the leader, the audit.

Each act is one struct, named by its tag in paths, messages and the audit. Knows no process and no key.
"""

import msgspec


class PinAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pin", tag_field="act"):
    """Keep an adapter (`name` or `tenant/name`) resident whatever its heat, or not any more."""

    adapter: str
    pinned: bool = True


class EvictAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="evict", tag_field="act"):
    """Have groups give the slots of an adapter up (a name, or a digest); those with a lease keep it until it ends."""

    adapter: str
    group: str = ""
    """Empty: all."""


class DrainMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drain", tag_field="act"):
    """Have a group or an engine take no new work, until it is told otherwise; also in its next lives."""

    member: str
    draining: bool = True


class Freeze(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="freeze", tag_field="act"):
    """Have the coordinator place, move, drain and scale nothing by itself."""

    frozen: bool = True


class Rebalance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rebalance", tag_field="act"):
    """Plan now. `fresh`: from empty groups, whatever it moves. `dry_run`: only say what would change."""

    dry_run: bool = False
    fresh: bool = False


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="scale", tag_field="act"):
    """Have so many engines or groups of a base, whatever its traffic. `count` None: as many as the traffic takes."""

    tier: str
    count: int | None = None
    model: str = ""
    """The base's served name; empty where there is only one."""
    force: bool = False
    """Also above the ceiling that the coordinator is set to."""


Act = PinAdapter | EvictAdapter | DrainMember | Freeze | Rebalance | Scale


class AdminRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An act that a coordinator has authenticated, on its way to the leader."""

    act: Act
    who: str
    reason: str = ""


class AdminReply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it, as the caller reads it."""

    result: dict[str, object]


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One act: written in one step with what it changes, or before what it orders."""

    entry_id: str
    """Makes it unlike every other."""
    at: str
    who: str
    epoch: int
    act: Act
    reason: str = ""


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """Who froze the fleet, when and why."""

    who: str
    at: str
    reason: str = ""
