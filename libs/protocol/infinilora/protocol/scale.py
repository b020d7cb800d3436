"""How many there should be: what the leading coordinator decides, and what an operator may set by hand. Pure."""

from typing import Literal, get_args

import msgspec

from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import Fingerprint

TierName = Literal["engines", "groups"]
TIERS: tuple[TierName, ...] = get_args(TierName)


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """Of one base. Instances are numbered from 0 by the end of their names; the last goes first."""

    base: Fingerprint
    model: str
    epoch: int
    engines: int
    groups: int
    group_shards: int = 1
    """Processes of one group."""
    draining: tuple[str, ...] = ()
    """Engines and groups that are to go and are emptied for it; those that an operator drains are not here."""
    why: dict[TierName, str] = {}

    def count(self, tier: TierName) -> int:
        return self.engines if tier == "engines" else self.groups


def by_hand(tier: TierName, model: str) -> str:
    """How an operator's count is named in the object at `keys.SCALE`."""
    return f"{tier}:{model}"


def check_tier(text: str) -> TierName:
    for tier in TIERS:
        if text == tier:
            return tier
    raise InvalidRequest(f"tier is {text[:40]!r}; wanted one of {', '.join(TIERS)}", param="tier")
