"""What things take in the simulated fleet: straight lines whose numbers come, each with its source, from a JSON file.

    base     max(floor, fixed + rows x row) + tokens x token + context x context      tokens computed, sampled, read
    deltas   fixed + rows x row + read bytes x byte                       of adapters; read: of each adapter once
    join     more of either, in a step with a prompt and with others that decode
    step     base + max(0, deltas + wait - hidden x base)                 the part of the base that deltas overlap with
    wait     rho / 2(1 - rho) services                                    at a group whose other engines keep it busy so

Which of two engines is faster, and by how much, is all here; which request goes first is the policies' alone.
"""

from pathlib import Path

import msgspec

from infinilora.planner.constants import Constant
from infinilora.planner.jsonfile import read_json
from infinilora.protocol.errors import InvalidRequest

CPU_FILE = Path(__file__).with_name("cpu.json")
BUSIEST = 0.95
"""A group's load that waits are computed for at most: queues of real engines end where each has asked once."""

NOTHING = Constant(0.0, "not counted")
"""Where a file does not name it."""


class BaseCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step without adapters, seconds: of itself, for each row, each token sampled and told, each token of context."""

    fixed_s: Constant
    row_s: Constant
    token_s: Constant
    context_s: Constant
    floor_s: Constant
    """Reading the weights: few rows take no less."""
    join_s: Constant = NOTHING
    """Taking a request in while others decode: the cores are shared."""

    def step_s(self, rows: int, tokens: int, context: int, *, is_joined: bool = False) -> float:
        rows_s = max(self.floor_s.value, self.fixed_s.value + rows * self.row_s.value)
        told_s = tokens * self.token_s.value + context * self.context_s.value
        return rows_s + told_s + is_joined * self.join_s.value


class DeltaCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The deltas of a step, seconds: of itself, for each row, each byte of weights that is read, and for a join."""

    fixed_s: Constant
    row_s: Constant
    byte_s: Constant
    join_s: Constant = NOTHING

    def step_s(self, rows: int, read_bytes: float, *, is_joined: bool = False) -> float:
        rows_s = self.fixed_s.value + rows * self.row_s.value
        return rows_s + read_bytes * self.byte_s.value + is_joined * self.join_s.value


class LoadCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter's way in: store -> host memory -> pool. One pipe each for a pool, first come first served."""

    latency_s: Constant
    store_bytes_per_s: Constant
    host_bytes_per_s: Constant
    first_layer_share: Constant
    """Of a load, after which the first layer can be computed. 1: adapters are admissible only as a whole."""


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of machine.

    `local`: deltas in the engine's own process; `remote`: at a LoRA server, but for the queue there; `service`: what
    of `remote` keeps the LoRA server busy.
    """

    name: str
    is_measured: bool
    base: BaseCost
    local: DeltaCost
    remote: DeltaCost
    service: DeltaCost
    load: LoadCost
    read_share: Constant
    """Of an adapter's bytes that one row reads: top_k / experts, 1 for dense bases."""
    hidden: Constant
    """Of a base step, behind which remote deltas hide."""
    gateway_s: Constant
    lease_s: Constant
    """Asking a LoRA server for a lease, there and back."""
    wire_bytes_per_row: Constant

    def read_bytes(self, rows: int, distinct_bytes: float, distinct: int) -> float:
        """Of the adapters of a step: no row reads more than its share, no adapter is read twice."""
        if not distinct:
            return 0.0
        return min(distinct_bytes, rows * distinct_bytes / distinct * self.read_share.value)


def wait_s(service_s: float, others: float) -> float:
    """In the queue of a group that the other engines keep busy for a share `others` of the time (M/D/1)."""
    rho = min(others, BUSIEST)
    return service_s * rho / (2.0 * (1.0 - rho))


def read_costs(path: Path) -> Costs:
    """InvalidRequest names the file, and the number that is missing, unknown or below 0."""
    costs = read_json(path, Costs, param="costs", wanted=f"the form of {CPU_FILE.name}")
    check_costs(costs, str(path))
    return costs


def check_costs(costs: Costs, source: str) -> None:
    for place, constant in constants_of(costs):
        value = constant.value
        least = 1e-12 if place.endswith("per_s") or place == "base.fixed_s" else 0.0
        if not least <= value < float("inf"):
            wanted = "a number above 0" if least else "0 or more"
            raise InvalidRequest(f"{source}: {place}: found {value:g}; wanted {wanted}", param="costs")


def constants_of(part: msgspec.Struct, prefix: str = "") -> list[tuple[str, Constant]]:
    """Each with its place, as in `base.row_s`."""
    found: list[tuple[str, Constant]] = []
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, Constant):
            found.append((prefix + name, value))
        elif isinstance(value, msgspec.Struct):
            found += constants_of(value, f"{prefix}{name}.")
    return found


def write_costs(costs: Costs, path: Path) -> None:
    """As `read_costs` reads it. InvalidRequest where it cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(costs), indent=2).decode() + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"found {path}, {error.strerror}; wanted a file to write", param="out") from None
