"""What is to be served: from a few options (a law of popularity), or from a file that names every adapter."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import msgspec
import numpy as np

from infinilora.coordinator.provision.admission import Ints
from infinilora.coordinator.provision.pools import Demand
from infinilora.coordinator.provision.popularity import shares, zipf
from infinilora.planner.geometry import TARGETS, Base, find_base
from infinilora.planner.jsonfile import read_json
from infinilora.protocol.errors import InvalidRequest

MAX_ADAPTERS = 1_000_000
MAX_NUMBER = 1e12
"""Of rates, seconds and counts: more is a slip of the hand, and squares of it would leave float64."""
MAX_BYTES = 2**62
"""Of all adapters together: sums of them stay in 64 bits."""
NUMBER_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class Served:
    """A base and what is asked of its adapters."""

    base: Base
    demand: Demand


class Adapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` adapters of one rank (or size) and weight each."""

    weight: float
    rank: int = 0
    num_bytes: int = 0
    count: int = 1


class BaseLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One base of a workload file. Weights are requests a second, as heat is; with `rate`, shares of that."""

    model: str
    residence_s: float
    adapters: list[Adapters]
    rate: float | None = None


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload file."""

    bases: list[BaseLoad]


@dataclass(frozen=True, slots=True)
class Law:
    """A workload of one base in a few numbers. `ranks` are dealt in turn, from the most popular adapter on."""

    model: str
    adapters: int
    zipf: float
    rate: float
    residence_s: float
    ranks: tuple[int, ...]


def targets_of(text: str) -> frozenset[str]:
    """What adapters adapt: `all`, or some of TARGETS."""
    if text == "all":
        return frozenset(TARGETS)
    found = frozenset(part.strip() for part in text.split(","))
    if odd := sorted(found - set(TARGETS)):
        raise InvalidRequest(f"found {odd[0]!r}; wanted all, or some of {', '.join(TARGETS)}", param="targets")
    return found


def number_bytes_of(dtype: str) -> int:
    if dtype not in NUMBER_BYTES:
        raise InvalidRequest(f"found {dtype!r}; wanted one of {', '.join(NUMBER_BYTES)}", param="dtype")
    return NUMBER_BYTES[dtype]


def ranks_of(text: str) -> tuple[int, ...]:
    """Ranks as they are written: 32, or 8,16,64."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isdecimal() and int(part) > 0):
            raise InvalidRequest(
                f"found {part!r}; wanted a whole number, 1 or more, or several with commas", param="rank"
            )
    return tuple(int(part) for part in parts)


def positive(value: float, param: str) -> float:
    if not 0 < value <= MAX_NUMBER:
        raise InvalidRequest(f"found {value:g}; wanted a number above 0, {MAX_NUMBER:g} at most", param=param)
    return value


def in_all(sizes: Sequence[int], counts: Sequence[int], param: str) -> Ints:
    """Each size so many times, as an array."""
    total = sum(size * count for size, count in zip(sizes, counts, strict=True))
    if total > MAX_BYTES:
        raise InvalidRequest(f"found adapters of {total:.2e} bytes in all; wanted {MAX_BYTES:.2e} at most", param=param)
    return np.repeat(np.array(sizes, dtype=np.int64), counts)


def by_law(law: Law, *, targets: frozenset[str], number_bytes: int) -> Served:
    """InvalidRequest names the number that is wrong."""
    if law.adapters > MAX_ADAPTERS:
        raise InvalidRequest(f"found {law.adapters}; wanted {MAX_ADAPTERS} at most", param="adapters")
    base = find_base(law.model, targets)
    rates = zipf(law.adapters, law.zipf) * positive(law.rate, "rate")
    sizes = [base.adapter_bytes(rank, number_bytes) for rank in law.ranks]
    num_bytes = in_all([size for size, _ in zip(cycle(sizes), rates, strict=False)], [1] * law.adapters, "rank")
    return Served(base, Demand(rates, num_bytes, positive(law.residence_s, "residence")))


def by_file(path: Path, *, targets: frozenset[str], number_bytes: int) -> list[Served]:
    """Read a workload file. InvalidRequest names the file, the place in it, what was found and what was wanted."""
    workload = read_json(path, Workload, param="workload", wanted="the form that docs/planning.md shows")
    if not workload.bases:
        raise InvalidRequest(f"{path}: bases: found none; wanted one or more", param="workload")
    served = []
    for index, load in enumerate(workload.bases):
        try:
            served.append(_served(load, targets=targets, number_bytes=number_bytes))
        except InvalidRequest as error:
            place = f"{path}: bases[{index}].{error.param}" if error.param else f"{path}: bases[{index}]"
            raise InvalidRequest(f"{place}: {error.message}", param="workload") from None
    return served


def _served(load: BaseLoad, *, targets: frozenset[str], number_bytes: int) -> Served:
    base = find_base(load.model, targets)
    total = sum(max(entry.count, 0) for entry in load.adapters)
    if not 1 <= total <= MAX_ADAPTERS:
        raise InvalidRequest(f"found {total}; wanted 1 to {MAX_ADAPTERS}", param="adapters")
    sizes = [_bytes_of(entry, index, base, number_bytes) for index, entry in enumerate(load.adapters)]
    counts = [entry.count for entry in load.adapters]
    weights = np.repeat(np.array([entry.weight for entry in load.adapters], dtype=np.float64), counts)
    rates = shares(weights) * positive(float(weights.sum()) if load.rate is None else load.rate, "rate")
    num_bytes = in_all(sizes, counts, "adapters")
    return Served(base, Demand(rates, num_bytes, positive(load.residence_s, "residence_s")))


def _bytes_of(entry: Adapters, index: int, base: Base, number_bytes: int) -> int:
    place = f"adapters[{index}]"
    if entry.count < 1:
        raise InvalidRequest(f"found a count of {entry.count}; wanted 1 or more", param=place)
    if (entry.rank > 0) == (entry.num_bytes > 0) or min(entry.rank, entry.num_bytes) < 0:
        found = f"a rank of {entry.rank} and num_bytes of {entry.num_bytes}"
        raise InvalidRequest(f"found {found}; wanted exactly one of the two, 1 or more", param=place)
    return entry.num_bytes or base.adapter_bytes(entry.rank, number_bytes)
