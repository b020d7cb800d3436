"""How long a group's death is felt: until what was asked for, and was nowhere else, is resident again. Pure."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from infinilora.protocol.ids import Digest


@dataclass(frozen=True, slots=True)
class Loss:
    """A group that died, when it was last heard, and what is missed of it."""

    group: str
    since: float
    missed: frozenset[Digest]


class Recovery:
    """The losses that are felt still, and what each group held when it was last there."""

    def __init__(self) -> None:
        self._held: dict[str, frozenset[Digest]] = {}
        self._losses: list[Loss] = []

    @property
    def missed(self) -> frozenset[Digest]:
        """Adapters that are asked for, were lost with a group, and are resident nowhere."""
        return frozenset(digest for loss in self._losses for digest in loss.missed)

    def look(
        self, resident: Mapping[str, Set[Digest]], dead: Mapping[str, float], wanted: Set[Digest], now: float
    ) -> dict[str, float]:
        """The groups whose death is felt no more, and for how long it was.

        `resident`: of each group that is there; `dead`: those that died, and when they were last heard; `wanted`: what
        is asked for at all.
        """
        lost = {group: held for group, held in self._held.items() if group in dead and group not in resident}
        self._losses += [Loss(group, dead[group], held) for group, held in sorted(lost.items())]
        self._held = {g: held for g, held in self._held.items() if g not in dead} | {
            group: frozenset(held) for group, held in resident.items()
        }
        there = frozenset(digest for held in resident.values() for digest in held)
        left = [Loss(loss.group, loss.since, (loss.missed & wanted) - there) for loss in self._losses]
        self._losses = [loss for loss in left if loss.missed]
        return {loss.group: now - loss.since for loss in left if not loss.missed}
