"""What the system says of the memory that something lies in."""

from pathlib import Path

from torch import Tensor

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def flags_of(tensor: Tensor) -> list[str]:
    """Of the mapping that holds a tensor's first byte: `hg` asks for large pages, `sh` is shared."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            begin, end = (int(edge, 16) for edge in name.split("-"))
            here = begin <= tensor.data_ptr() < end
        elif here and name == "VmFlags:":
            return rest.split()
    raise AssertionError("no mapping holds the tensor")
