"""How many sequences may be in the house at once, in all and for one tenant. No waiting room: engines queue."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from infinilora.gateway.plan import Target
from infinilora.gateway.reports import Advised
from infinilora.protocol.errors import Overloaded, RateLimited
from infinilora.protocol.ids import SloClass


class Admission:
    """Counts sequences from admission to answer. Used by one event loop."""

    def __init__(self, *, max_sequences: int, max_tenant_sequences: int, advised: Advised | None = None) -> None:
        self._max_sequences = max_sequences
        self._max_tenant_sequences = max_tenant_sequences
        self._advised = advised
        self._running: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        return self._running.total()

    def slo_class(self, asked: SloClass, target: Target) -> SloClass:
        """The class that a request is served as now. Raises Overloaded for one that is to come later."""
        return asked if self._advised is None else self._advised.slo_class(asked, target)

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
