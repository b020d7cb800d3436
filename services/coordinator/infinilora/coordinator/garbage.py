"""What becomes of a digest that a deleted name had. Pure.

live -> (no name for a grace time, no lease) dying -> forgotten by every process -> object, record, gone
"""

from typing import Literal

Fate = Literal["keep", "wait", "drop", "forget"]


def fate(state: Literal["live", "dying"], *, is_named: bool, is_leased: bool, unseen_s: float, grace_s: float) -> Fate:
    """`keep`: some name leads to it. `drop`: it is `dying` from now on. `forget`: every process is to let go of it.

    `unseen_s` is for how long no name is known to lead to it: requests that were admitted before may still come.
    """
    if is_named:
        return "keep"
    if state == "dying":
        return "forget"
    return "wait" if is_leased or unseen_s < grace_s else "drop"
