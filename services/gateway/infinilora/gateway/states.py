"""How adapters fare, by the last word of every process that has to do with them. Pure.

    pending    nobody has it, or brings it: it is loaded when it is asked for
    loading    somebody brings it
    ready      somebody who takes work has all of it
    draining   whoever has it takes no new work
    failed     nobody has it, and who tried could not load it; the next request tries again, after a pause

Of several processes the best counts; each is told beside it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from infinilora.protocol.ids import Digest
from infinilora.runtime.membership import Member

State = Literal["ready", "loading", "draining", "failed", "pending"]
BEST_FIRST: tuple[State, ...] = ("ready", "loading", "draining", "failed")


class Place(NamedTuple):
    """How an adapter fares on one LoRA server group, or in the pool of one engine; `reason` it failed for."""

    on: str
    state: State
    code: str = ""
    reason: str = ""


class States:
    """The account of one moment."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._places: dict[Digest, list[Place]] = {}
        for member in members:
            if member.health != "dead":
                for digest, place in _places_on(member):
                    self._places.setdefault(digest, []).append(place)

    def of(self, digest: Digest) -> State:
        found = {place.state for place in self._places.get(digest, ())}
        return next((state for state in BEST_FIRST if state in found), "pending")

    def show(self, digest: Digest) -> dict[str, Any]:
        """As the API tells it: `state`, `state_reason` of one that failed, and `places`."""
        state, places = self.of(digest), self._places.get(digest, [])
        reasons = (f"{place.code}: {place.reason}" for place in places if place.state == "failed")
        return {
            "state": state,
            "state_reason": next(reasons, None) if state == "failed" else None,
            "places": [place._asdict() for place in places],
        }


def _places_on(member: Member) -> Iterator[tuple[Digest, Place]]:
    load, on = member.beat.load, member.beat.group or member.beat.id
    if load is None:
        return
    held: State = "ready" if member.beat.state == "ready" else "draining"
    for digest in load.resident:
        yield digest, Place(on, held)
    for digest in load.loading:
        yield digest, Place(on, "loading")
    for failure in load.failed:
        if failure.digest not in load.loading:
            yield failure.digest, Place(on, "failed", failure.code, failure.message)
