"""Which limit leaves the least, and what is said of a sum that does not fit it."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from infinilora.protocol.errors import InvalidRequest
from infinilora.runtime.capacity import (
    RESERVE_BYTES,
    THREADS_BYTES,
    Limit,
    Term,
    check_fits,
    limits_now,
    tightest,
)

MIB = 1 << 20
STATUS = "Name:\tx\nVmSize:\t 4096 kB\nVmData:\t 2048 kB\nRssAnon:\t 1024 kB\nRssShmem:\t 512 kB\nThreads:\t3\n"


class Machine:
    """What a process sees of one: 8 GiB, no other limit."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "groups"
        self.write("proc/self/status", STATUS)
        self.write("proc/meminfo", "MemTotal:\t 8388608 kB\nHugePages_Total: 0\n")
        self.root = root

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def limits(self, setting_bytes: int = 0) -> dict[str, Limit]:
        return {limit.name: limit for limit in limits_now(setting_bytes, proc=self.proc, groups=self.groups)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_limits_is_its_memory(machine: Machine) -> None:
    found = machine.limits()["this machine's memory"]
    assert (found.num_bytes, found.used_bytes) == (8 << 30, 1536 << 10)
    assert found.left_bytes == (8 << 30) - (1536 << 10) - RESERVE_BYTES


@pytest.mark.parametrize(
    ("status", "used"), [("VmRSS:\t 3072 kB\n", 3 * MIB), ("Name:\tx\n", 0)], ids=["no kinds of pages", "nothing"]
)
def test_a_kernel_that_tells_less_is_taken_as_it_is(machine: Machine, status: str, used: int) -> None:
    machine.write("proc/self/status", status)
    (machine.proc / "meminfo").unlink()
    (found,) = machine.limits().values()
    assert found.used_bytes == used
    check_fits([Term("weights", 1 << 50)], found)


def test_a_setting_is_a_limit_too(machine: Machine) -> None:
    limits = machine.limits(512 * MIB)
    assert tightest(list(limits.values())) == Limit("INFINILORA_MEMORY_BYTES", 512 * MIB, 1536 << 10)


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        ("0::/a/b\n", {"a/memory.max": "1048576\n", "a/b/memory.max": "max\n"}, {"/a": MIB}),
        ("0::/a/b\n", {"a/memory.max": "1048576\n", "a/b/memory.max": "4096\n"}, {"/a": MIB, "/a/b": 4096}),
        ("0::/host/only\n", {"memory.max": "2097152\n"}, {"/": 2 * MIB}),
        ("4:memory:/job\n1:cpu:/\n0::/\n", {"memory/job/memory.limit_in_bytes": "1048576\n"}, {"/job": MIB}),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712\n"}, {}),
    ],
    ids=["of a group around", "of both", "in a container", "of the first kind", "that is none"],
)
def test_control_groups_are_read(machine: Machine, groups: str, files: dict[str, str], wanted: dict[str, int]) -> None:
    machine.write("proc/self/cgroup", groups)
    for name, text in files.items():
        machine.write(f"groups/{name}", text)
    prefix = "memory of control group "
    found = {name.removeprefix(prefix): limit.num_bytes for name, limit in machine.limits().items() if prefix in name}
    assert found == wanted


def test_a_limit_of_the_process_counts_addresses(tmp_path: Path) -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))\n"
        "from infinilora.runtime.capacity import limits_now, tightest\n"
        "limit = tightest(limits_now())\n"
        "print(limit.name, limit.num_bytes, limit.left_bytes < (3 << 30) - (512 << 20), sep='|')"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"the process's limit of data|{3 << 30}|True"
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != 3 << 30


def test_what_fits_to_the_byte_is_taken_and_one_more_is_refused_with_every_term() -> None:
    limit = Limit("the limit", 1000 * MIB, 100 * MIB)
    terms = [Term("weights", 800 * MIB), Term("keys and values", 36 * MIB, "INFINILORA_KV_BYTES")]
    check_fits(terms, limit)
    with pytest.raises(InvalidRequest) as refused:
        check_fits([*terms, Term("links", 1)], limit)
    for words in (
        "the limit is 1,048,576,000 bytes, and this process may have to hold 1,048,576,001, 1 too many",
        f"{164 * MIB:,} this process so far, and its reserve + {800 * MIB:,} weights + ",
        f"{36 * MIB:,} keys and values (less by INFINILORA_KV_BYTES) + 1 links",
    ):
        assert words in str(refused.value)


def test_stacks_of_threads_are_kept_room_for_where_addresses_count() -> None:
    left = Limit("data", 1 << 30, 0, counts_addresses=True).left_bytes
    assert Limit("memory", 1 << 30, 0).left_bytes - left == THREADS_BYTES
