"""From a plan to what engines are told, step by step. Pure: time comes in as an argument.

plan        where adapters are to be
table       what engines are told: `plan`, and what an adapter still needs of where it was
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

from infinilora.coordinator.hints import Hint, Pair
from infinilora.coordinator.placement import Table
from infinilora.protocol.ids import Digest

FORGIVEN = 10.0
"""Times `move_s`: how long a group that failed at an adapter is not asked for it again."""

Resident = Mapping[str, Set[Digest]]
"""Of each group that can be given work now: what is in its pool."""


def table(plan: Table, told: Table, resident: Resident, wanted: Set[Digest], failed: Set[Pair] = frozenset()) -> Table:
    """What engines are to be told now, that are told `told`. Groups that cannot be given work are not in it.

    One of `wanted` stays where it is resident until a group that it is planned on has it; a group that failed at an
    adapter is left out where another home is left.
    """
    result = {group: set(plan.get(group, ())) for group in resident if group in plan or told.get(group)}
    leaving = {group: (wanted & set(told.get(group, ())) & resident[group]) - result[group] for group in result}
    planned = _planned(plan, frozenset().union(*leaving.values()))
    for group, digests in leaving.items():
        result[group] |= {digest for digest in digests if _is_under_way(planned[digest], digest, resident)}
    for group, digest in sorted(failed):
        if digest in result.get(group, ()) and any(
            digest in held and (other, digest) not in failed for other, held in result.items() if other != group
        ):
            result[group].discard(digest)
    return {group: tuple(sorted(held)) for group, held in sorted(result.items()) if held or group in plan}


def _is_under_way(planned: list[str], digest: Digest, resident: Resident) -> bool:
    """Whether an adapter is to be somewhere, and is at none of these places yet."""
    groups = [group for group in planned if group in resident]
    return bool(groups) and not any(digest in resident[group] for group in groups)


def _planned(plan: Table, digests: frozenset[Digest]) -> dict[Digest, list[str]]:
    found: dict[Digest, list[str]] = {digest: [] for digest in digests}
    for group, held in plan.items() if digests else ():
        for digest in digests.intersection(held):
            found[digest].append(group)
    return found


class Attempts:
    """What groups were asked, what they failed at, what may be asked now.

    `_asked`: a staging, since when it is asked for; until it is resident, failed, or its group is gone. `_given`: any
    hint, when it was last given. `_silent`: a life of a group's server that did not answer, until when it is left
    alone: it beats, but each hint to it would be waited for.
    """

    def __init__(self, *, move_s: float, pause_s: float, max_under_way: int) -> None:
        self._move_s = move_s
        self._pause_s = pause_s
        self._max_under_way = max_under_way
        self._asked: dict[Pair, float] = {}
        self._given: dict[Hint, float] = {}
        self._failed: dict[Pair, float] = {}
        self._silent: dict[str, tuple[str, float]] = {}

    def look(self, resident: Resident, now: float) -> None:
        """What has come of it."""
        self._given = {hint: at for hint, at in self._given.items() if now - at < self._pause_s}
        self._failed = {pair: until for pair, until in self._failed.items() if now < until}
        self._silent = {group: one for group, one in self._silent.items() if now < one[1]}
        open_pairs = {pair: at for pair, at in self._asked.items() if pair[1] not in resident.get(pair[0], {pair[1]})}
        late = {pair for pair, at in open_pairs.items() if now - at >= self._move_s}
        self._asked = {pair: at for pair, at in open_pairs.items() if pair not in late}
        self._failed |= dict.fromkeys(late, now + FORGIVEN * self._move_s)

    @property
    def failed(self) -> frozenset[Pair]:
        """Groups and the adapters that they failed at."""
        return frozenset(self._failed)

    @property
    def asked(self) -> frozenset[Pair]:
        """Groups and the adapters that they are staging now."""
        return frozenset(self._asked)

    def take(self, wanted: Iterable[Hint], now: float, lives: Mapping[str, str] | None = None) -> list[Hint]:
        """Those that are to be given now: not again so soon, and of one group only so many at a time.

        `lives`: the incarnation of each group's server; a new one is asked whatever became of the one before.
        """
        under_way: dict[str, int] = defaultdict(int)
        for group, _ in self._asked:
            under_way[group] += 1
        taken = []
        for hint in wanted:
            if self.is_silent(hint.group, (lives or {}).get(hint.group)):
                continue
            is_repeated = (hint.group, hint.digest) in self._asked
            if hint not in self._given and (is_repeated or under_way[hint.group] < self._max_under_way):
                under_way[hint.group] += not is_repeated
                taken.append(hint)
        self._given |= dict.fromkeys(taken, now)
        for hint in taken:
            if hint.action == "stage":
                self._asked.setdefault((hint.group, hint.digest), now)
        return taken

    def is_silent(self, group: str, life: str | None) -> bool:
        """Whether this life of a group's server is to be left alone still, as of the latest look."""
        return group in self._silent and self._silent[group][0] == life

    def unanswered(self, group: str, life: str, now: float) -> None:
        """Nobody has answered a command to this life of a group's server."""
        self._silent[group] = life, now + self._pause_s

    def refused(self, hint: Hint) -> None:
        """The command did not arrive, or was not taken: nobody works at it."""
        self._asked.pop((hint.group, hint.digest), None)
