"""What a pool computes on: its memory, how bytes get there, and how far what was launched there has run.

    HostDevice     a call has run when it returns
    CudaDevice     a call is launched: it runs later, on the stream of the thread that launched it

A pool never waits for a device where somebody waits for the pool: it asks events whether they are over.
"""

import re
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from infinilora.kernels.large_pages import large_pages
from infinilora.protocol.errors import InvalidRequest

_CUDA = re.compile(r"cuda(?::([0-9]+))?")


class Event(Protocol):
    """A moment of a stream. It is over when all that was launched there before it has run."""

    def is_over(self) -> bool:
        """Never blocks. Any thread."""
        ...

    def wait(self) -> None:
        """Return when it is over. Holds up this thread alone, and nothing on the device."""
        ...


class Stream(Protocol):
    """What launches run on one after another. Equal to itself alone."""

    def event(self) -> Event:
        """The moment now. Any thread."""
        ...


class Device(Protocol):
    """Thread-safe. `torch_device`: where its tensors are, with a number."""

    torch_device: torch.device
    is_host: bool
    """Whether the host writes its memory itself, and a call has run when it returns."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]. InvalidRequest where there is not so much."""
        ...

    def stream(self) -> Stream:
        """The stream on which the calling thread launches now."""
        ...

    def use_own_stream(self) -> None:
        """From now on the calling thread launches on a stream of its own: it holds up nobody else's launches."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of host memory that `fill` reads fastest from."""
        ...

    def fill(self, target: Tensor, source: Tensor) -> Event:
        """Copy host bytes to bytes of this device, beside all launches. `source` must stay until it is over."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether what is launched here can read and write it."""
        ...

    def bring(self, tensor: Tensor) -> Tensor:
        """A copy of a host's tensor, for what this thread launches from here on."""
        ...

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy to a host's tensor what this thread's launches make of `source`; returns when it is there."""
        ...


class Over:
    """What has run already: an event, and the stream of a thread that runs all it calls."""

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        """It is over."""

    def event(self) -> Event:
        return self


_OVER = Over()


class HostDevice:
    """This machine's processor and memory."""

    torch_device = torch.device("cpu")
    is_host = True

    def allocate(self, num_bytes: int) -> Tensor:
        return large_pages(num_bytes)

    def stream(self) -> Stream:
        return _OVER

    def use_own_stream(self) -> None:
        """There are no streams here."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fill(self, target: Tensor, source: Tensor) -> Event:
        target.copy_(source)
        return _OVER

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device

    def bring(self, tensor: Tensor) -> Tensor:
        return tensor

    def fetch(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """A torch event that was recorded once."""

    event: torch.cuda.Event

    def is_over(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()  # made to sleep, not to spin


@dataclass(frozen=True, slots=True)
class CudaStream:
    """A torch stream; equal to another of the same CUDA stream."""

    stream: torch.cuda.Stream

    def event(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return CudaEvent(event)


class CudaDevice:
    """One CUDA device. Copies have a stream of their own."""

    is_host = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._copies: Any = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]

    def allocate(self, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            raise InvalidRequest(
                f"{num_bytes} bytes for adapters on {self.torch_device}: found {free} free of {total}; "
                "wanted a smaller pool, or a device with more memory"
            ) from error

    def stream(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.torch_device))

    def use_own_stream(self) -> None:
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fill(self, target: Tensor, source: Tensor) -> Event:
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            return CudaStream(self._copies).event()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device

    def bring(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


def open_device(name: str) -> Device:
    """The device of a setting: `cpu`, `cuda` (the first) or `cuda:N`. InvalidRequest where this process has it not."""
    if name == "cpu":
        return HostDevice()
    named = _CUDA.fullmatch(name)
    if named is None:
        raise InvalidRequest(f"INFINILORA_DEVICE is {name!r}; wanted cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise InvalidRequest(
            f"INFINILORA_DEVICE is {name!r}, and torch {torch.__version__} finds no CUDA device here "
            "(torch.cuda.is_available() is false); wanted an NVIDIA GPU with its driver and a CUDA build of torch, "
            "or INFINILORA_DEVICE=cpu"
        )
    count, ordinal = torch.cuda.device_count(), int(named[1] or 0)
    if ordinal >= count:
        raise InvalidRequest(f"INFINILORA_DEVICE is {name!r}; wanted one of the {count} CUDA devices, counted from 0")
    return CudaDevice(torch.device("cuda", ordinal))
