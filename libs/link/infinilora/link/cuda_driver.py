"""GPU memory that two processes share, by CUDA IPC through the driver's own library (libcuda, by ctypes).

What a process lends it must not free while the borrower may still write: `Regions` keeps a lent region until the
borrower's end of the link's socket is closed, which it is after unmapping, or by its death. Knows no message.
"""

import ctypes
import logging
import select
import socket
import threading
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from infinilora.kernels.mailbox import NUM_NOTES, NUM_PROGRAMS
from infinilora.protocol.errors import Unavailable

logger = logging.getLogger(__name__)

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_MPS_ENABLED = 133
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED; older drivers do not know it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process's device that a peer may map by its handle."""

    address: int
    handle: bytes


class Memory(Protocol):
    """What a link needs of a device: CUDA's, or in tests shared memory of this machine."""

    device: torch.device
    num_programs: int
    """Of each launch."""

    @property
    def uuid(self) -> str:
        """The same in every process that sees this device."""
        ...

    @property
    def has_mps(self) -> bool:
        """Whether several processes run on this device at once."""
        ...

    def allocate(self, size: int) -> Region:
        """Zeroed memory to be lent."""
        ...

    def free(self, region: Region) -> None: ...

    def map(self, handle: bytes) -> int:
        """The address in this process of what a peer lent."""
        ...

    def unmap(self, address: int) -> None: ...

    def notes(self) -> Tensor:
        """int64 [NUM_NOTES], zeros, that kernels write and the host reads."""
        ...

    def synchronize(self) -> None:
        """Wait until this thread's stream has run what was launched."""
        ...

    def quiesce(self) -> None:
        """Wait until the device has run what any thread launched."""
        ...

    def use_own_stream(self) -> None:
        """From now on this thread launches on a stream of its own: a waiting kernel holds up nobody else's."""
        ...


class _Handle(Structure):
    _fields_ = (("bytes", c_ubyte * HANDLE_BYTES),)


class _Uuid(Structure):
    _fields_ = (("bytes", c_ubyte * 16),)


class Driver:
    """The functions of libcuda that a link calls. Unavailable, with the driver's own words, where one fails."""

    def __init__(self, library: str = _LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            initialise = self._library.cuInit
        except (OSError, AttributeError) as error:
            raise Unavailable(
                f"no cuda link: {library} cannot be used ({error}); it comes with the NVIDIA driver"
            ) from error
        if status := initialise(c_uint(0)):
            raise Unavailable(f"no cuda link: cuInit failed with {status}: the driver runs no device here")
        self._contexts: dict[int, c_void_p] = {}

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorString(c_int(status), byref(text))
            said = text.value.decode() if text.value else "no text for it"
            raise Unavailable(f"no cuda link: {name} failed with {status} ({said})")

    def device(self, ordinal: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), c_int(ordinal))
        return device.value

    def uuid(self, device: int) -> str:
        """In hex; under MIG that of the instance."""
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", byref(uuid), c_int(device))
        return bytes(uuid.bytes).hex()

    def has_mps(self, device: int) -> bool:
        """Whether processes share this device at once; without MPS they take turns, and a waiting kernel wastes its."""
        enabled = c_int()
        try:
            self._call("cuDeviceGetAttribute", byref(enabled), c_int(_MPS_ENABLED), c_int(device))
        except Unavailable:
            return False
        return bool(enabled.value)

    def enter(self, device: int) -> None:
        """Make the device's primary context, which torch uses, this thread's."""
        context = self._contexts.get(device)
        if context is None:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(size))
        self._call("cuMemsetD8_v2", address, c_ubyte(0), c_size_t(size))
        self._call("cuCtxSynchronize")
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", c_uint64(address))

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        function = self._library.cuIpcOpenMemHandle_v2
        function.argtypes = (POINTER(c_uint64), _Handle, c_uint)  # a structure by value
        address = c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", c_uint64(address))


class CudaMemory:
    """The memory of one CUDA device, with torch's context and streams."""

    num_programs = NUM_PROGRAMS

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        if not torch.cuda.is_available():
            raise Unavailable(f"no cuda link on {device}: this torch finds no CUDA device (torch.cuda.is_available())")
        self.device = torch.empty(0, device=device).device  # "cuda" is a wish; memory is on "cuda:0"
        self._driver = driver or Driver()
        self._ordinal = self._driver.device(self.device.index)

    @property
    def uuid(self) -> str:
        return self._driver.uuid(self._ordinal)

    @property
    def has_mps(self) -> bool:
        return self._driver.has_mps(self._ordinal)

    def allocate(self, size: int) -> Region:
        self._driver.enter(self._ordinal)
        address = self._driver.allocate(size)
        return Region(address, self._driver.handle(address))

    def free(self, region: Region) -> None:
        self._driver.enter(self._ordinal)
        self._driver.free(region.address)

    def map(self, handle: bytes) -> int:
        self._driver.enter(self._ordinal)
        return self._driver.open(handle)

    def unmap(self, address: int) -> None:
        self._driver.enter(self._ordinal)
        self._driver.close(address)

    def notes(self) -> Tensor:
        return torch.zeros(NUM_NOTES, dtype=torch.int64).pin_memory()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def quiesce(self) -> None:
        torch.cuda.synchronize(self.device)

    def use_own_stream(self) -> None:
        torch.cuda.set_device(self.device)
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            return  # it has one
        torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]


class Regions:
    """What a process has lent, and what waits for its borrower to be gone. Thread-safe: links end where they may."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._changing = threading.Lock()
        self._lent: set[Region] = set()
        self._parked: list[tuple[Region, socket.socket]] = []

    def lend(self, size: int) -> Region:
        """Zeroed memory for a link; it ends by `retire`, or by `withdraw` if no peer was ever told of it."""
        self.reap()
        region = self.memory.allocate(size)
        with self._changing:
            self._lent.add(region)
        return region

    def withdraw(self, region: Region) -> None:
        """Free what nobody can have mapped. Harmless when repeated."""
        with self._changing:
            is_ours = region in self._lent
            self._lent.discard(region)
        if is_ours:
            self.memory.free(region)

    def retire(self, region: Region, peer: int | None, sock: socket.socket) -> None:
        """A link is over: unmap the peer's region and say so; free our own once the peer has done the same."""
        self.memory.quiesce()
        if peer is not None:
            self.memory.unmap(peer)
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            logger.debug("the peer of a link was gone before this end")
        with self._changing:
            self._lent.discard(region)
            self._parked.append((region, sock))
        self.reap()

    def reap(self) -> None:
        """Free what no peer can write to any more."""
        with self._changing:
            over = [(region, sock) for region, sock in self._parked if _is_over(sock)]
            self._parked = [parked for parked in self._parked if parked not in over]
        for region, sock in over:
            self.memory.free(region)
            sock.close()

    @property
    def num_parked(self) -> int:
        return len(self._parked)


def _is_over(sock: socket.socket) -> bool:
    """Whether the peer's end is closed; what it said before that is dropped."""
    while select.select([sock], [], [], 0)[0]:
        try:
            if not sock.recv(1 << 16):
                return True
        except OSError:
            return True
    return False
