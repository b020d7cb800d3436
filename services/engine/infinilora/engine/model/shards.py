"""What the shards of an engine say to one another in the middle of a step: sums, and what the head has decided."""

from typing import Protocol

from torch import Tensor

from infinilora.engine.model.cut import Cut


class Shards(Protocol):
    """One shard among all. Every shard makes the same calls in the same order; each waits for the others."""

    cut: Cut

    def sum(self, partial: Tensor) -> None:
        """Make a contiguous tensor the sum of all shards', in place."""
        ...

    def share(self, tensor: Tensor) -> None:
        """Make it the head's, in place."""
        ...


class Alone:
    """An engine of one shard: nothing to say."""

    cut = Cut()

    def sum(self, partial: Tensor) -> None:
        pass

    def share(self, tensor: Tensor) -> None:
        pass
