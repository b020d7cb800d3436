"""How fast LoRA server groups are against one another, from what their beats tell. Pure."""

from collections.abc import Mapping
from math import isfinite, log2


def relative_speeds(rows_per_s: Mapping[str, float]) -> dict[str, float]:
    """Group -> its speed in halves of the fastest's: 1, 1/2, 1/4, ... to the nearest on a scale of ratios.

    So coarse, because measurements of two alike differ: those within a factor of 1.4 of the fastest are as fast. A
    group that tells none (it is older than the field, 0) counts as the fastest.
    """
    told = {group: rows for group, rows in rows_per_s.items() if rows > 0 and isfinite(rows)}
    fastest = max(told.values(), default=1.0)
    return {group: 2.0 ** round(log2(told.get(group, fastest) / fastest)) for group in rows_per_s}
