"""How urgent a sequence is. Pure: times come in as arguments, in seconds of one clock.

Each sequence has a *due* time when it arrives, and the earliest due goes first: in admission, in prefill, and last in
preemption. Slack is due - now; since now is the same for all, the order by due is the order by slack, and a sequence
that waits ages by itself.

    due = arrival + ALLOWANCE_S[class], or the request's own deadline if that is earlier; never before arrival + SOON_S

Nobody starves: a sequence of allowance A is passed only by such as arrive less than A - SOON_S after it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from infinilora.protocol.ids import SloClass

ALLOWANCE_S: Mapping[SloClass, float] = MappingProxyType({"interactive": 0.25, "standard": 2.0, "batch": 60.0})
SOON_S = min(ALLOWANCE_S.values())
QUEUE_SHARE: Mapping[SloClass, float] = MappingProxyType({"interactive": 1.0, "standard": 1.0, "batch": 0.5})
"""How much of an engine's queue may be full before a sequence of this class is refused."""


def due_s(
    slo_class: SloClass, arrival_s: float, deadline_s: float | None = None, *, is_continued: bool = False
) -> float:
    """When a sequence is due. A continued one has a client that looks at half an answer: it is due soon."""
    wanted_s = arrival_s + (SOON_S if is_continued else ALLOWANCE_S[slo_class])
    return max(wanted_s if deadline_s is None else min(wanted_s, deadline_s), arrival_s + SOON_S)
