"""How many sequences may be in the house at once, in all and for one tenant. No waiting room: engines queue."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from infinilora.protocol.errors import Overloaded, RateLimited


class Admission:
    """Counts sequences from admission to answer. Used by one event loop."""

    def __init__(self, *, max_sequences: int, max_tenant_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._max_tenant_sequences = max_tenant_sequences
        self._running: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        return self._running.total()

    @contextmanager
    def admit(self, tenant: str, sequences: int) -> Iterator[None]:
        """Hold places for a request's sequences. Raises RateLimited or Overloaded."""
        if self._running[tenant] + sequences > self._max_tenant_sequences:
            raise RateLimited(
                f"{self._running[tenant]} sequences of yours are running and {sequences} more were asked for; "
                f"at most {self._max_tenant_sequences} at a time",
                retry_after_s=1.0,
            )
        if self.num_running + sequences > self._max_sequences:
            raise Overloaded(
                f"{self.num_running} sequences are running; at most {self._max_sequences}", retry_after_s=1.0
            )
        self._running[tenant] += sequences
        try:
            yield
        finally:
            self._running[tenant] -= sequences
            if not self._running[tenant]:
                del self._running[tenant]
