"""Whether the worst that a process may have to hold fits the memory it may use: counted once, at its start.

Every limit that it runs under is looked at: the settings' own, those of its control groups, those of the process (the
like of `ulimit`), and the machine's memory. The one that leaves the least counts. What a service needs it says in
terms; the sum is logged, and a sum that does not fit ends the start, term by term, before anything large is allocated.
"""

import logging
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infinilora.protocol.errors import InvalidRequest

logger = logging.getLogger(__name__)

RESERVE_BYTES = 64 << 20
"""For what nobody counts: connections, logs, what an allocator keeps."""
THREADS_BYTES = 512 << 20
"""Where address space is limited, for the stacks and arenas of threads that are to come; little of it is ever used."""


class Term(NamedTuple):
    """Memory for one purpose, and which setting makes it less."""

    name: str
    num_bytes: int
    setting: str = ""


class Limit(NamedTuple):
    """At most `num_bytes`, of which this process has taken `used_bytes` already."""

    name: str
    num_bytes: int
    used_bytes: int
    counts_addresses: bool = False
    """Also those that nothing was ever written to."""

    @property
    def left_bytes(self) -> int:
        """For the terms of a service."""
        own = RESERVE_BYTES + (THREADS_BYTES if self.counts_addresses else 0)
        return self.num_bytes - self.used_bytes - own


def limits_now(
    setting_bytes: int = 0, *, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> list[Limit]:
    """Those of this process; `setting_bytes`: what an operator allows it, 0 for no more than the others do."""
    status = _numbers(proc / "self/status")
    resident = _resident(status)
    found = [Limit("INFINILORA_MEMORY_BYTES", setting_bytes, resident)] if setting_bytes else []
    found += [Limit(f"memory of control group {name}", most, resident) for name, most in _group_limits(proc, groups)]
    for name, number, taken in (
        ("data", resource.RLIMIT_DATA, "VmData"),
        ("address space", resource.RLIMIT_AS, "VmSize"),
    ):
        most = resource.getrlimit(number)[0]
        if most != resource.RLIM_INFINITY:
            limit = Limit(f"the process's limit of {name}", most, status.get(taken, 0), counts_addresses=True)
            found.append(limit)
    return [*found, Limit("this machine's memory", _numbers(proc / "meminfo").get("MemTotal", _NO_LIMIT), resident)]


def tightest(limits: Sequence[Limit]) -> Limit:
    return min(limits, key=lambda limit: limit.left_bytes)


def total(terms: Iterable[Term]) -> int:
    return sum(term.num_bytes for term in terms)


def check_fits(terms: Sequence[Term], limit: Limit) -> None:
    """Raise InvalidRequest, with every term, where the sum does not fit."""
    wanted = total(terms)
    if wanted <= limit.left_bytes:
        return
    taken = limit.num_bytes - limit.left_bytes
    summed = [Term("this process so far, and its reserve", taken), *terms]
    words = [f"{t.num_bytes:,} {t.name}" + (f" (less by {t.setting})" if t.setting else "") for t in summed]
    raise InvalidRequest(
        f"not enough memory: {limit.name} is {limit.num_bytes:,} bytes, and this process may have to hold "
        f"{taken + wanted:,}, {taken + wanted - limit.num_bytes:,} too many: {' + '.join(words)}"
    )


def tell(terms: Sequence[Term], limit: Limit) -> None:
    """Log a sum that fits."""
    counted = {term.name: term.num_bytes for term in terms}
    extra = {"limit": limit.name, "limit_bytes": limit.num_bytes, "left_bytes": limit.left_bytes - total(terms)}
    logger.info("memory counted", extra={"terms_bytes": counted, **extra})


def _resident(status: Mapping[str, int]) -> int:
    """Memory of this process's own. Not every kernel tells it from pages of files, and some sandboxes tell nothing."""
    if "RssAnon" in status:
        return status["RssAnon"] + status.get("RssShmem", 0)
    return status.get("VmRSS", 0)


def _group_limits(proc: Path, groups: Path) -> list[tuple[str, int]]:
    """Of the control groups that this process is in, and of those around them, as far as they can be seen here."""
    found = []
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = root / path.strip("/")
        # In a container the path is the host's, and what is seen as the root is the container's own.
        for group in (inner, *inner.parents) if inner.is_dir() else (root,):
            if not group.is_relative_to(root):
                break
            most = "".join(_lines(group / name)).strip()
            if most.isdecimal() and int(most) < _NO_LIMIT:
                found.append((f"/{group.relative_to(root)}".removesuffix("/."), int(most)))
    return [(name or "/", most) for name, most in found]


_NO_LIMIT = 1 << 60
"""Control groups of the first kind say "none" by a number near 2**63."""


def _numbers(path: Path) -> dict[str, int]:
    """Bytes, from lines of `Name:   12 kB`."""
    words = (line.split() for line in _lines(path))
    return {word[0].rstrip(":"): int(word[1]) << 10 for word in words if len(word) == 3 and word[2] == "kB"}


def _lines(path: Path) -> list[str]:
    """Nothing where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
