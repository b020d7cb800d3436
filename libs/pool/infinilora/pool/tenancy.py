"""The things a slot table is made of: slots, those who wait for one, and what is to be done next. Pure values.

What may follow upon what, `slots.py` says; nothing here decides.
"""

from dataclasses import dataclass, field
from enum import Enum

from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.ids import Digest

DEFAULT_RELOAD_S = 0.1
"""What a reload is taken to cost until one was measured."""


class SlotState(Enum):
    """EMPTY: nobody's. STAGING: layers arrive. READY: all are there. DRAINING: memory is being given back."""

    EMPTY = "empty"
    STAGING = "staging"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class Slot:
    """An adapter's place. `holders` lease it; `is_wanted` keeps an unleased load going (a Stage hint or a pin)."""

    index: int
    slot_generation: int
    state: SlotState = SlotState.EMPTY
    digest: Digest | None = None
    num_bytes: int = 0
    num_layers: int = 0
    layers_ready: int = 0
    staged_at: float = 0.0
    reload_s: float = DEFAULT_RELOAD_S
    holders: set[str] = field(default_factory=set)
    is_wanted: bool = False
    evict_when_idle: bool = False


@dataclass(slots=True)
class Waiting:
    """A digest without a slot. `num_bytes` is None until its manifest is read.

    It waits `since` its size was known and somebody asked. `split_at`: how many slots had been freed when its room
    lay in too many pieces (`no_room`).
    """

    digest: Digest
    holders: set[str] = field(default_factory=set)
    is_wanted: bool = False
    num_bytes: int | None = None
    num_layers: int = 0
    since: float = 0.0
    bypassed: int = 0
    split_at: int | None = None

    @property
    def has_claim(self) -> bool:
        return bool(self.holders) or self.is_wanted


@dataclass(frozen=True, slots=True)
class Drain:
    """Give this slot's memory back (stop its load first, if one runs), then report `emptied`."""

    slot: int
    slot_generation: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Place:
    """Find memory for this digest, then report `place`, or `no_room` if it lies in too many pieces."""

    digest: Digest
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell whoever waits for this digest, and report `refuse`."""

    digest: Digest
    error: InfiniLoraError


Decision = Drain | Place | Refuse


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how often a waiting digest may be passed by later ones; see the module's text."""

    max_bypass: int = 16
    age_after_s: float = 2.0
    max_wait_s: float = 30.0
