"""A stand-in for a GPU whose launches and copies run late, when the test says so: what is given up early is seen.

A launch reads what lies in the pool's memory, and in its table of slots, when it runs; as a kernel does. So a slot
that was emptied, or given to another adapter, before a launch of its former tenancy has run makes its numbers wrong.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from support.pools import WAIT_S, DefinedKernels


@dataclass(eq=False)
class LateStream:
    """Work in order. `run` does what is there; `is_held`: nothing runs before that."""

    is_held: bool = True
    launched: int = 0
    done: int = 0
    _work: deque[Callable[[], None]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def launch(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(work)
            self.launched += 1
            if not self.is_held:
                self._run()

    def run(self) -> None:
        with self._changed:
            self._run()

    def _run(self) -> None:
        while self._work:
            self._work.popleft()()
            self.done += 1
        self._changed.notify_all()

    def event(self) -> "LateEvent":
        with self._changed:
            return LateEvent(self, self.launched)

    def wait(self, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.done >= number, WAIT_S):
                raise TimeoutError("the test never let the stream run")


@dataclass(frozen=True)
class LateEvent:
    stream: LateStream
    number: int

    def is_over(self) -> bool:
        return self.stream.done >= self.number

    def wait(self) -> None:
        self.stream.wait(self.number)


class LateDevice:
    """Memory of this machine. All threads launch on `launches`, but for those that asked for a stream of their own."""

    torch_device = torch.device("cpu")
    is_host = False

    def __init__(self) -> None:
        self.launches = LateStream()
        self.own: list[LateStream] = []
        """Those of threads that asked for one."""
        self.copies = LateStream(is_held=False)
        self._thread = threading.local()
        self._here: list[range] = []

    def run(self) -> None:
        """All that was launched."""
        for stream in (self.launches, *self.own):
            stream.run()

    def allocate(self, num_bytes: int) -> Tensor:
        return self._ours(torch.zeros(num_bytes, dtype=torch.uint8))

    def _ours(self, tensor: Tensor) -> Tensor:
        self._here.append(range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def stream(self) -> LateStream:
        found: LateStream = getattr(self._thread, "stream", self.launches)
        return found

    def use_own_stream(self) -> None:
        self._thread.stream = LateStream()
        self.own.append(self._thread.stream)

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fill(self, target: Tensor, source: Tensor) -> LateEvent:
        def copy() -> None:
            target.copy_(source)

        self.copies.launch(copy)
        return self.copies.event()

    def holds(self, tensor: Tensor) -> bool:
        return any(tensor.data_ptr() in here for here in self._here)

    def bring(self, tensor: Tensor) -> Tensor:
        return self._ours(tensor.clone())

    def fetch(self, target: Tensor, source: Tensor) -> None:
        self.stream().event().wait()
        target.copy_(source)


class LateKernels(DefinedKernels):
    """The reference's definition, launched: each call returns at once and is computed when its stream runs."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    @override
    def dense(self, layer: int, site: int, segments: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        compute = super().dense
        self._device.stream().launch(lambda: compute(layer, site, segments, x, out, accumulate=accumulate))
