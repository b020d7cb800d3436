"""The memory that adapters lie in."""

from pathlib import Path

from infinilora.pool.memory import adapter_memory
from infinilora.pool.pages import PageArena

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def flags_at(address: int) -> list[str]:
    """What the system says of the mapping that holds an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            begin, end = (int(edge, 16) for edge in name.split("-"))
            here = begin <= address < end
        elif here and name == "VmFlags:":
            return rest.split()
    raise AssertionError("no mapping holds the address")


def test_adapters_lie_in_large_pages_of_this_process_alone_where_there_are_any() -> None:
    arena = PageArena(8 << 20)
    (run,) = arena.allocate([5000]) or ()
    memory = adapter_memory(8 << 20)
    for bytes_of_adapters in (run.data, memory):
        flags = flags_at(bytes_of_adapters.data_ptr())
        assert ("hg" in flags) == LARGE_PAGES.exists()
        assert "sh" not in flags, "what is shared lies in small pages"


def test_memory_is_as_long_as_asked_for_and_can_be_written() -> None:
    memory = adapter_memory(5000)
    assert memory.shape == (5000,)
    memory[:] = 7
    assert memory.sum() == 35_000
