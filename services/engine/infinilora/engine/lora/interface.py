"""The one door between the engine and whoever computes LoRA deltas: a LoRA server, this process, or nobody.

The scheduler asks for leases, the model submits activations and adds what comes back; neither knows where
the delta is computed. Rows of a step are ordered by adapter, so that each adapter's rows are one segment
and base rows come last and never leave the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor

from infinilora.engine.lora.scales import ColumnScales
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.ids import Digest
from infinilora.protocol.sites import site_mask

COMPUTED_SITES = site_mask(Site)
"""The sites whose deltas the model submits and adds. An adapter that needs another is never served by halves."""


class LeaseStatus(Enum):
    """WAITING: no slot yet. ADMISSIBLE: first layer ready. RESIDENT: all are. FAILED: `error` says why."""

    WAITING = "waiting"
    ADMISSIBLE = "admissible"
    RESIDENT = "resident"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lease:
    """An engine's hold on a slot of a group. Bit s of `layer_sites[l]`: site s of layer l is adapted.

    `scales` where the adapter scales the base's output at some sites (DoRA). `may_narrow`: what is computed with it may
    come of rows that a link narrowed, here or in keys and values that are kept.
    """

    digest: Digest
    group: str
    slot: int
    slot_generation: int
    layer_sites: tuple[int, ...]
    scales: ColumnScales | None = None
    may_narrow: bool = False


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What is known of a wanted adapter. `lease` is set if ADMISSIBLE or RESIDENT, `error` if FAILED.

    A WAITING view with a lease has its slot and waits for its first layer; without one it waits for a slot.
    `layers_ready` counts the leading layers that an ADMISSIBLE one has.
    """

    status: LeaseStatus
    lease: Lease | None = None
    error: InfiniLoraError | None = None
    layers_ready: int = 0

    def has_layers(self, count: int) -> bool:
        """Whether layers 0..count-1 may be computed now; lm_head is the layer after the last of the model."""
        return self.status is LeaseStatus.RESIDENT or (
            self.status is LeaseStatus.ADMISSIBLE and self.layers_ready >= count
        )


class AdapterRows(NamedTuple):
    """Rows [row_start, row_start + rows) of a step run with this lease."""

    row_start: int
    rows: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class Routing:
    """A MoE layer's choice. topk_ids int32 [T, k]; topk_weights fp32 [T, k], as the expert sum uses them."""

    topk_ids: Tensor
    topk_weights: Tensor


class StepPlan(Protocol):
    """One step's LoRA work. `num_rows`: the leading rows of the step that have an adapter."""

    @property
    def num_rows(self) -> int: ...

    def adapts(self, layer: int, site: Site) -> bool:
        """Whether any adapter of this step adapts this site; nothing is sent where none does."""
        ...

    def window(self, start: int, stop: int) -> "StepPlan | None":
        """The same step where x and y hold its rows [start, stop) alone; None where no adapter has any of them.

        Windows that do not overlap may be under way at one time. They end with their plan.
        """
        ...


class Ticket(Protocol):
    """A delta on its way. Used once, by `add`."""


class StepLost(Exception):
    """The delta of some rows will not come: their step must be re-run whole. `digests` names whose rows."""

    def __init__(self, digests: frozenset[Digest], reason: str) -> None:
        super().__init__(reason)
        self.digests = digests
        self.reason = reason


class LoraBackend(Protocol):
    """Leases and deltas. Nothing blocks but `add` and `verify`.

    `want` from any thread, also while a step runs: it takes nothing from those who hold. All else from the engine's
    step thread alone, and `drop` between two steps.
    """

    def want(self, digest: Digest) -> None:
        """Count one more holder of `digest`; the first asks for a lease at once. Non-blocking."""
        ...

    def drop(self, digest: Digest) -> None:
        """Count one holder less; the last gives the lease up."""
        ...

    def view(self, digest: Digest) -> LeaseView:
        """The state of a wanted digest."""
        ...

    def begin(self, rows: Sequence[AdapterRows], trace: bytes = b"") -> StepPlan | None:
        """Start a step. None when no row has an adapter: such a step touches no link (law 5).

        `trace` is the context of one sampled request of the step (runtime.telemetry.to_wire), or empty.
        """
        ...

    def submit(
        self, plan: StepPlan, layer: int, site: Site, x: Tensor, routing: Routing | None = None
    ) -> Ticket | None:
        """Send the plan's rows of x [T, in] (MOE_DOWN: [T, k, f]); None where nothing is adapted.

        For EMBED x is the token ids, int32 [T, 1].
        """
        ...

    def add(self, ticket: Ticket | None, y: Tensor) -> None:
        """y[:num_rows] += delta, in place; waits at most the site deadline. StepLost: here, or in `verify`.

        Rows whose adapter has a column scale here are multiplied by it first: y = y * factors + delta.
        y is [T, out]; for MOE_GATE_UP [T, k, 2f]; for MOE_DOWN [T, h], already router-weighted and summed.
        """
        ...

    def verify(self) -> None:
        """Call it before what was computed since the last call is told. Raises StepLost where a delta did not come.

        Where a device adds them, `add` has only launched that: this waits until it has run, as long as `add` may.
        """
        ...

    def end(self, plan: StepPlan) -> None:
        """The step is over, or abandoned: outstanding replies are stale from here on."""
        ...

    def take_waits(self) -> dict[Site, float]:
        """Exposed wait: seconds that `add` spent waiting since this was asked last, by site; sites used alone."""
        ...

    def close(self) -> None: ...

    def check(self) -> None:
        """Raise AssertionError unless no holder, no ticket and no plan is left (run when idle)."""
        ...


OnChange = Callable[[], None]
"""Called from any thread when a view may have changed, to wake an idle loop."""
