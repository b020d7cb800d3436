"""What an engine is still to be told of its leases, newest state only: from the pool's threads to the stream's task.

A lease of an adapter that needs what the engine does not compute (a site, column scales) is refused here: it would
serve half of it. Column scales go before the news that their layer is ready, once for each tenancy.
"""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from infinilora.pool.pool import LeaseState
from infinilora.protocol import lora_pb2
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.protocol.sites import first_beyond

Message = lora_pb2.ServerMessage


@dataclass(slots=True)
class _Announced:
    """A tenancy that the engine knows of, and how many of its column scales it was sent."""

    tenancy: tuple[int, int]
    scales_sent: int = 0


class Outbox:
    """At most one unsent state for a digest: a slow reader gets fewer messages, never older ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, computed_sites: int, *, scales_columns: bool = False) -> None:
        """`computed_sites`: a mask of what the engine adds deltas at; and whether it applies column scales there."""
        self._loop = loop
        self._computed_sites = computed_sites
        self._scales_columns = scales_columns
        self._lock = threading.Lock()
        self._unsent: dict[Digest, LeaseState] = {}
        self._announced: dict[Digest, _Announced] = {}
        self._refused: list[Digest] = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, state: LeaseState) -> None:
        """From any thread."""
        with self._lock:
            self._unsent[state.digest] = state
        self._wake()

    def forget(self, digest: Digest) -> None:
        """The lease was given up: what is unsent of it is void, and a new lease is announced anew."""
        with self._lock:
            self._unsent.pop(digest, None)
            self._announced.pop(digest, None)

    def take_refused(self) -> list[Digest]:
        """Whose leases the latest messages refuse: they are still held, and whoever sends must give them up first."""
        refused, self._refused = self._refused, []
        return refused

    def close(self) -> None:
        """Nothing more will come; `take` returns what is left and then nothing. From any thread."""
        self._is_closed = True
        self._wake()

    async def take(self) -> list[Message]:
        """Wait for something to say; an empty list means that the outbox is closed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            with self._lock:
                states, self._unsent = list(self._unsent.values()), {}
            messages = [message for state in states for message in self._messages(state)]
            if messages or self._is_closed:
                if self._is_closed:
                    self._changed.set()
                return messages

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    def _messages(self, state: LeaseState) -> list[Message]:
        digest = state.digest
        error = state.error or self._half_served(state)
        if error:
            self._announced.pop(digest, None)
            if not state.error:
                self._refused.append(digest)
            lost = lora_pb2.LeaseFailed(digest=digest, code=error.code, message=error.message)
            return [Message(failed=lost)]
        return list(self._news(state))

    def _news(self, state: LeaseState) -> Iterator[Message]:
        digest, slot, generation = state.digest, state.slot, state.slot_generation
        known = self._announced.get(digest)
        if known is None or known.tenancy != (slot, generation):
            known = self._announced[digest] = _Announced((slot, generation))
            granted = lora_pb2.LeaseGranted(
                digest=digest,
                slot=slot,
                slot_generation=generation,
                layer_sites=state.layer_sites,
                scaled_sites=state.scaled_sites,
            )
            yield Message(granted=granted)
        for scale in state.scales[known.scales_sent :]:
            sent = lora_pb2.ColumnScale(
                digest=digest,
                slot=slot,
                slot_generation=generation,
                layer=scale.layer,
                site=scale.site,
                factors=scale.factors.numpy().astype("<f4", copy=False).tobytes(),
            )
            yield Message(scale=sent)
        known.scales_sent = len(state.scales)
        if state.layers_ready:
            ready = lora_pb2.LayersReady(digest=digest, slot=slot, slot_generation=generation, count=state.layers_ready)
            yield Message(layers=ready)

    def _half_served(self, state: LeaseState) -> AdapterFailed | None:
        beyond = first_beyond(state.layer_sites, self._computed_sites)
        if beyond is not None:
            layer, site = beyond
            what = f"adapts site {site.label} of layer {layer}"
        elif state.scaled_sites and not self._scales_columns:
            what = "scales columns of the base's output (DoRA)"
        else:
            return None
        return AdapterFailed(
            f"adapter {state.digest} {what}, which this engine does not compute; "
            "wanted an engine that does (a newer version)"
        )
