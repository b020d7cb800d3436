"""Which instance goes when there is to be one fewer, and when it may. Pure.

Instances of one tier are numbered from 0 by the end of their names. The last goes first, as a StatefulSet has it:

count 3 -> engine-2 drains -> it holds nothing -> count 2 -> whoever follows the count ends it -> its drain is over
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Holding = Literal["starting", "busy", "drained"]
"""What stands in the way of an instance's end: nothing yet, work, nothing any more."""
_NUMBER = re.compile(r"(\d+)\Z")


class Step(NamedTuple):
    """How many are to be published, and the names that are to be draining for its sake."""

    num: int
    draining: frozenset[str]


def step(count: int, target: int, there: Mapping[str, Holding], draining: Iterable[str]) -> Step:
    """From `count` towards `target`. `there`: the instances of this tier that are not dead; `draining`: asked by us.

    One goes at a time. What drains and is wanted again stays; what drained and is gone does not drain its next life.
    """
    ours = set(draining)
    last = next((name for name in sorted(there) if number_of(name) == count - 1), None)
    is_free = last is None or there[last] == "starting" or (last in ours and there[last] == "drained")
    after = target if target > count else count - (target < count and is_free)
    leaving = {name for name in ours if name in there and number_of(name) >= after}
    if target < count and last is not None:
        leaving.add(last)
    return Step(after, frozenset(leaving))


def number_of(name: str) -> int:
    """-1 for a name that does not end in a number: it is not one of those that are counted."""
    found = _NUMBER.search(name)
    return int(found[1]) if found else -1
