"""The device memory that a `cuda` link's tests run on: a GPU's where there is one, else a double of it.

The double is shared memory of this machine, on which the link's own kernels run interpreted. Why a double: the order
of stores between two processes is what the link is about, and most test machines have no GPU.
"""

import ctypes
import mmap
import secrets
from pathlib import Path

import torch
from torch import Tensor

from infinilora.kernels.mailbox import NUM_NOTES
from infinilora.link.cuda_driver import HANDLE_BYTES, CudaMemory, Memory, Region


class LoopbackMemory:
    """A region is a file in a directory that both processes know."""

    device = torch.device("cpu")
    num_programs = 2
    uuid = "loopback"

    def __init__(self, directory: Path, *, has_mps: bool) -> None:
        self.has_mps = has_mps
        self._directory = directory
        self._maps: dict[int, mmap.mmap] = {}
        self._owned: dict[int, Path] = {}

    def allocate(self, size: int) -> Region:
        path = self._directory / f"region-{secrets.token_hex(8)}"
        path.write_bytes(bytes(size))
        handle = path.name.encode().ljust(HANDLE_BYTES, b"\0")
        address = self.map(handle)
        self._owned[address] = path
        return Region(address, handle)

    def free(self, region: Region) -> None:
        self._owned.pop(region.address).unlink()
        self.unmap(region.address)

    def map(self, handle: bytes) -> int:
        with (self._directory / handle.rstrip(b"\0").decode()).open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._maps[address] = mapping
        return address

    def unmap(self, address: int) -> None:
        del self._maps[address]

    def notes(self) -> Tensor:
        return torch.zeros(NUM_NOTES, dtype=torch.int64)

    def synchronize(self) -> None:
        """The interpreter runs a launch before it returns."""

    quiesce = use_own_stream = synchronize


class GivenMps(CudaMemory):
    """A GPU of which the test says whether it has MPS: both ways of signalling run wherever there is a device."""

    has_mps = False


def memory_of(directory: Path, *, has_mps: bool) -> Memory:
    if not torch.cuda.is_available():
        return LoopbackMemory(directory, has_mps=has_mps)
    memory = GivenMps(torch.device("cuda"))
    memory.has_mps = has_mps
    return memory
