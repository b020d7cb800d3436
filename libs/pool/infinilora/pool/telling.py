"""Of which layers a word is said while an adapter loads. Pure.

Each word is a message to whoever leases it, costs both ends some hundred microseconds of Python, and makes a pass of
its rows go on by a part of its own. What is not told is not computed yet, and that part is left when all are there.
"""

PARTS = 8
"""An adapter is told in about so many parts, once it is well under way."""


def is_worth_telling(told: int, count: int, num_layers: int) -> bool:
    """Whether to say that layers 0..count-1 of `num_layers` are there, where 0..told-1 were told before.

    The first and the last at once; in between what is half as much again, and no more than a PARTS-th of all.
    """
    if count >= num_layers:
        return True
    return count - told >= min(max(1, told // 2), -(-num_layers // PARTS))
