"""The native library's instruction sets that this processor has, one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager

from infinilora.kernels import native
from infinilora.kernels.settings import LEVELS


def levels_here() -> tuple[str, ...]:
    """From the weakest to the strongest that the processor has."""
    with limited_to(LEVELS[-1]) as strongest:
        return LEVELS[: LEVELS.index(strongest) + 1]


@contextmanager
def limited_to(level: str) -> Iterator[str]:
    """Nothing stronger than `level` meanwhile; the level that is in use."""
    library = native.load()
    assert library is not None
    before = library.il_level()
    try:
        yield LEVELS[library.il_limit_level(LEVELS.index(level))]
    finally:
        library.il_limit_level(before)
