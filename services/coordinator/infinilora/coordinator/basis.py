"""Whether a plan is still good, or another is worth its time. Pure.

A plan of the same arguments is the same plan. Of others it may differ; but where nothing has changed but by how much
each adapter is asked for, the difference is small and can wait: a large fleet takes seconds to plan, and heat changes
with every request.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Self

from infinilora.coordinator.placement import Adapter, Group
from infinilora.protocol.ids import Digest

PLAN_SHARE = 0.05
"""Of a core, for planning that only follows rates."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What a plan was made from. `homeless`: adapters that are asked for and are nowhere in it."""

    groups: list[Group]
    registered: Mapping[Digest, Adapter]
    copies: Mapping[Digest, int]
    """Of those that are to have more than one."""
    rising: Set[Digest]
    homeless: Set[Digest]
    rates: Mapping[Digest, float]
    follow_at: float
    """From when another plan may follow the rates."""

    def holds(self, now: Self) -> bool:
        """Whether a plan of this is good enough as things are now (`now.follow_at`: the time).

        It is not once a group, an adapter, a pin or a number of copies is another, one more adapter rises, or one more
        is asked for that is nowhere.
        """
        is_alike = (self.groups, self.registered, self.copies) == (now.groups, now.registered, now.copies)
        if not is_alike or not now.rising <= self.rising or not now.homeless <= self.homeless:
            return False
        return now.follow_at < self.follow_at or self.rates == now.rates
