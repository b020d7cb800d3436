"""Who uses a pool, what each may compute with, and how each is told. Not thread-safe: the pool locks around it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infinilora.pool.device import Device
from infinilora.pool.execute import Grants, OnStep
from infinilora.pool.retire import RetireQueue
from infinilora.pool.scales import AdapterScales, SiteScale
from infinilora.pool.tenancy import Slot
from infinilora.protocol.errors import InfiniLoraError
from infinilora.protocol.ids import Digest


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What a holder's lease has come to: granted with so many leading layers ready, or failed with `error`.

    `layer_sites`: bit s of entry l says that site s of layer l is adapted; lm_head is the last layer. `scaled_sites`
    says the same of column scales (empty: there are none), and `scales` holds those of the layers that are ready.
    """

    digest: Digest
    slot: int = -1
    slot_generation: int = 0
    layer_sites: tuple[int, ...] = ()
    layers_ready: int = 0
    error: InfiniLoraError | None = None
    scaled_sites: tuple[int, ...] = ()
    scales: tuple[SiteScale, ...] = ()

    @property
    def is_admissible(self) -> bool:
        return self.error is None and self.layers_ready > 0

    @property
    def is_resident(self) -> bool:
        return self.is_admissible and self.layers_ready >= len(self.layer_sites)


OnChange = Callable[[LeaseState], None]
"""Told each new state of one lease, in order, from any thread, under the pool's lock: be quick, do not call back.

After a state with `error` the lease is gone. Nothing comes after `release` or `drop` has returned.
"""


@dataclass(slots=True)
class _Holder:
    grants: Grants
    listeners: dict[Digest, OnChange]


class Holders:
    """Each holder's grants say the same as what it was last told."""

    def __init__(self, retiring: RetireQueue, device: Device, on_step: OnStep | None = None) -> None:
        """`retiring` is told what a holder has launched when it loses a slot; `on_step` the slots of each step."""
        self._retiring = retiring
        self._device = device
        self._on_step = on_step
        self._holders: dict[str, _Holder] = {}

    def grants(self, holder: str) -> Grants:
        return self._of(holder).grants

    def listen(self, holder: str, digest: Digest, on_change: OnChange) -> None:
        """Tell `on_change` of this lease from now on."""
        self._of(holder).listeners[digest] = on_change

    def forget(self, holder: str, digest: Digest, slot: Slot | None) -> None:
        """The holder gave the lease up: nothing more is said of it. Waits for a running execution of this holder."""
        if known := self._holders.get(holder):
            known.listeners.pop(digest, None)
            if slot:
                self._retiring.note(slot.index, known.grants.revoke(slot.index))

    def gone(self, holder: str) -> None:
        """It may compute with nothing any more."""
        if known := self._holders.pop(holder, None):
            for slot, events in known.grants.revoke_all().items():
                self._retiring.note(slot, events)

    def tell(self, slot: Slot, layer_sites: tuple[int, ...], scales: AdapterScales, *, only: str | None = None) -> None:
        """Grant what the slot has to its holders (or to one), and say so."""
        assert slot.digest is not None
        state = LeaseState(
            slot.digest,
            slot.index,
            slot.slot_generation,
            layer_sites,
            slot.layers_ready,
            scaled_sites=scales.sites,
            scales=scales.until(slot.layers_ready),
        )
        for name in slot.holders if only is None else (only,):
            holder = self._holders[name]
            holder.grants.grant(slot.index, slot.slot_generation, slot.layers_ready)
            holder.listeners[slot.digest](state)

    def lose(self, names: Iterable[str], digest: Digest, error: InfiniLoraError, slot: Slot | None = None) -> None:
        """Say that the lease, or the wait for it, is lost."""
        for name in names:
            holder = self._holders[name]
            if slot:
                self._retiring.note(slot.index, holder.grants.revoke(slot.index))
            holder.listeners.pop(digest)(LeaseState(digest, error=error))

    def _of(self, holder: str) -> _Holder:
        return self._holders.setdefault(holder, _Holder(Grants(self._on_step, self._device), {}))
