"""An engine without adapters: every one that is asked for is refused, in words that say why."""
# ruff: noqa: ARG002 - the interface has arguments that nothing here needs

import threading
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from infinilora.engine.lora.interface import AdapterRows, LeaseStatus, LeaseView, Routing, StepPlan, Ticket
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import AdapterNotFound, Internal
from infinilora.protocol.ids import Digest


class NoLora:
    """The LoraBackend of `lora=none`. No step of it ever has adapter rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: Counter[Digest] = Counter()

    def want(self, digest: Digest) -> None:
        with self._lock:
            self._holders[digest] += 1

    def drop(self, digest: Digest) -> None:
        with self._lock:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]

    def view(self, digest: Digest) -> LeaseView:
        error = AdapterNotFound(
            f"adapter {digest} cannot be served: this engine runs without adapters (INFINILORA_LORA=none); "
            "start it with 'remote' or 'local'"
        )
        return LeaseView(LeaseStatus.FAILED, error=error)

    def begin(self, rows: Sequence[AdapterRows], trace: bytes = b"") -> StepPlan | None:
        if rows:
            raise Internal("a step has adapter rows, but no lease was ever given")
        return None

    def submit(
        self,
        plan: StepPlan,
        layer: int,
        site: Site,
        x: Tensor,
        routing: Routing | None = None,
    ) -> Ticket | None:
        return None

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        """There is never anything to add."""

    def end(self, plan: StepPlan) -> None:
        """There is never a plan to end."""

    def verify(self) -> None:
        """Nothing was added."""

    def take_waits(self) -> dict[Site, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""

    def check(self) -> None:
        assert not self._holders, f"adapters are still held: {dict(self._holders)}"
