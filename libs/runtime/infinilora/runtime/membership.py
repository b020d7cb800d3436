"""Who is alive, decided from heartbeats. Pure: time comes in as an argument, nothing goes out but changes.

Time is counted in beats: `interval_s` is what a process promises between two. One silent interval and a bit
makes a member *suspect*, three make it *dead*. Silence proves nothing while we cannot hear: decisions freeze
while the bus is away, after a stall of our own, and when most members fall silent at once, until the bus has
been proved (`bus_proved`) and two intervals have passed.

A life of a process is an *incarnation*: a new one replaces the old, whose late beats are ignored for good. So are
those of a life that the leading coordinator has called dead (`bury`), whatever is heard of it here; without its word,
the dead that beat again live.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from infinilora.protocol.control import Beat, ProcessKind

Health = Literal["alive", "suspect", "dead"]
ChangeKind = Literal["joined", "replaced", "updated", "suspect", "alive", "dead", "forgotten"]

SUSPECT_BEATS = 1.5
DEAD_BEATS = 3.0
THAW_BEATS = 2.0
MAX_PAST = 64
"""Of a process that dies and starts for ever, no more lives are remembered: a beat is never so late."""
FORGET_BEATS = 240.0
"""The dead are remembered for two minutes, so that a late beat of theirs is known for what it is."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process as it last spoke. `heard_at` is on the observer's clock."""

    beat: Beat
    heard_at: float
    health: Health = "alive"
    past: tuple[str, ...] = ()
    """Earlier incarnations, the last MAX_PAST."""
    is_buried: bool = False
    """The leading coordinator has called this life dead."""

    @property
    def key(self) -> "MemberKey":
        return (self.beat.kind, self.beat.id)


MemberKey = tuple[ProcessKind, str]


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to whom. `updated`: alive as before, with another state or address."""

    kind: ChangeKind
    member: Member


def health_after(silent_s: float, interval_s: float) -> Health:
    """What a silence means, when we could have heard."""
    if silent_s >= DEAD_BEATS * interval_s:
        return "dead"
    return "suspect" if silent_s >= SUSPECT_BEATS * interval_s else "alive"


class Membership:
    """All members that one observer knows, and whether its view may be trusted now."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._members: dict[MemberKey, Member] = {}
        self._order: list[MemberKey] | None = None
        """The keys in their order; made anew when one comes or goes."""
        self._frozen_until = 0.0
        self._proved_at = 0.0
        self._bus_is_away = False
        self._wants_proof = False
        self._swept_at: float | None = None

    def members(self) -> list[Member]:
        if self._order is None:
            self._order = sorted(self._members)
        return [self._members[key] for key in self._order]

    def get(self, kind: ProcessKind, process_id: str) -> Member | None:
        return self._members.get((kind, process_id))

    def is_frozen(self, now: float) -> bool:
        return self._bus_is_away or self._wants_proof or now < self._frozen_until

    @property
    def wants_proof(self) -> bool:
        """Most members are silent: ask the bus for a sign of life, then call `bus_proved`."""
        return self._wants_proof

    def bus_went(self) -> None:
        self._bus_is_away = True

    def bus_proved(self, now: float) -> None:
        """The bus is (back) there. What was silent so far gets two intervals to speak."""
        self._bus_is_away = self._wants_proof = False
        self._proved_at = now
        self._freeze(now)

    def hear(self, beat: Beat, now: float) -> list[Change]:
        known = self._members.get((beat.kind, beat.id))
        if known is None:
            return self._keep("joined", Member(beat, now))
        if beat.incarnation in known.past:
            return []
        if beat.incarnation != known.beat.incarnation:
            past = (*known.past, known.beat.incarnation)[-MAX_PAST:]
            return self._keep("replaced", Member(beat, now, past=past))
        if beat.seq <= known.beat.seq or known.is_buried:
            return []
        member = Member(beat, now, past=known.past)
        if known.health != "alive":
            return self._keep("alive", member)
        if (beat.state, beat.address, beat.base) != (known.beat.state, known.beat.address, known.beat.base):
            return self._keep("updated", member)
        self._members[member.key] = member
        return []

    def bury(self, kind: ProcessKind, process_id: str, incarnation: str) -> list[Change]:
        """This life is over, for good; a life that is not the latest known here was over before."""
        known = self._members.get((kind, process_id))
        if known is None or known.is_buried or known.beat.incarnation != incarnation:
            return []
        buried = replace(known, health="dead", is_buried=True)
        self._members[buried.key] = buried
        return [Change("dead", buried)] if known.health != "dead" else []

    def sweep(self, now: float) -> list[Change]:
        """Judge every silence. Call it about twice an interval, after all waiting beats were heard."""
        if self._swept_at is not None and now - self._swept_at > THAW_BEATS * self._interval_s:
            self._freeze(now)  # we were the ones who stood still
        self._swept_at = now
        # The dead are silent too: of a thousand that beat, none is looked at twice.
        silent = [m for m in self._members.values() if now - m.heard_at >= SUSPECT_BEATS * self._interval_s]
        if self._is_isolated(silent):
            self._wants_proof = True
        if self.is_frozen(now):
            return []
        return [change for member in sorted(silent, key=lambda m: m.key) for change in self._judge(member, now)]

    def _judge(self, member: Member, now: float) -> list[Change]:
        silent_s = now - member.heard_at
        if member.health == "dead":
            if silent_s < FORGET_BEATS * self._interval_s:
                return []
            del self._members[member.key]
            self._order = None
            return [Change("forgotten", member)]
        health = health_after(silent_s, self._interval_s)
        if health == member.health or health == "alive":
            return []
        return self._keep(health, replace(member, health=health))

    def _is_isolated(self, silent: list[Member]) -> bool:
        """Most of the living are silent, two or more of them only now: one alone may simply have died."""
        silent = [m for m in silent if m.health != "dead"]
        newly = [m for m in silent if m.heard_at >= self._proved_at]
        return len(newly) >= 2 and 2 * len(silent) > sum(m.health != "dead" for m in self._members.values())

    def _freeze(self, now: float) -> None:
        self._frozen_until = max(self._frozen_until, now + THAW_BEATS * self._interval_s)

    def _keep(self, kind: ChangeKind, member: Member) -> list[Change]:
        if member.key not in self._members:
            self._order = None
        self._members[member.key] = member
        return [Change(kind, member)]


def of_kind(members: Iterable[Member], kind: ProcessKind) -> list[Member]:
    """Those of one kind that may be given work: alive or merely suspect, and ready."""
    return [m for m in members if m.beat.kind == kind and m.health != "dead" and m.beat.state == "ready"]
