"""The scheduler's view of leases, over a LoRA backend: its states in the scheduler's words."""

import threading
from collections import Counter

from infinilora.engine.lora.interface import LeaseStatus, LoraBackend
from infinilora.engine.sched.scheduler import LeaseState
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.ids import Digest


class BackendLeases:
    """Counts this engine's holders by digest, so that a leak can be seen. `want` from any thread, as of a backend."""

    def __init__(self, backend: LoraBackend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._holders: Counter[Digest] = Counter()

    def want(self, digest: Digest) -> None:
        with self._lock:
            self._holders[digest] += 1
        self._backend.want(digest)

    def drop(self, digest: Digest) -> None:
        self._backend.drop(digest)
        with self._lock:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]

    def state(self, digest: Digest) -> LeaseState:
        if digest not in self._holders:
            return LeaseState.NO_SLOT
        view = self._backend.view(digest)
        match view.status:
            case LeaseStatus.RESIDENT:
                return LeaseState.READY
            case LeaseStatus.FAILED:
                return LeaseState.FAILED
            case LeaseStatus.ADMISSIBLE:
                return LeaseState.ADMISSIBLE
            case LeaseStatus.WAITING:
                return LeaseState.NO_SLOT if view.lease is None else LeaseState.LOADING

    def error(self, digest: Digest) -> InfiniLoraError | None:
        return self._backend.view(digest).error

    def held(self) -> tuple[Digest, ...]:
        with self._lock:
            return tuple(sorted(self._holders))

    def check_idle(self) -> None:
        assert not self._holders, f"leases are still held: {dict(self._holders)}"
