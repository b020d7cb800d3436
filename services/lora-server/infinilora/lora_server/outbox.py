"""What an engine is still to be told of its leases, newest state only: from the pool's threads to the stream's task.

A lease of an adapter that needs a site which the engine does not compute is refused here: it would serve half of it.
"""

import asyncio
import threading

from infinilora.pool.pool import LeaseState
from infinilora.protocol import lora_pb2
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest
from infinilora.protocol.sites import first_beyond

Message = lora_pb2.ServerMessage


class Outbox:
    """At most one unsent state for a digest: a slow reader gets fewer messages, never older ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, computed_sites: int) -> None:
        """`computed_sites`: a mask of what the engine adds deltas at."""
        self._loop = loop
        self._computed_sites = computed_sites
        self._lock = threading.Lock()
        self._unsent: dict[Digest, LeaseState] = {}
        self._announced: dict[Digest, tuple[int, int]] = {}
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
        tenancy = (state.slot, state.slot_generation)
        messages = []
        if self._announced.get(digest) != tenancy:
            self._announced[digest] = tenancy
            messages.append(
                Message(
                    granted=lora_pb2.LeaseGranted(
                        digest=digest, slot=tenancy[0], slot_generation=tenancy[1], layer_sites=state.layer_sites
                    )
                )
            )
        if state.layers_ready:
            messages.append(
                Message(
                    layers=lora_pb2.LayersReady(
                        digest=digest, slot=tenancy[0], slot_generation=tenancy[1], count=state.layers_ready
                    )
                )
            )
        return messages

    def _half_served(self, state: LeaseState) -> AdapterFailed | None:
        beyond = first_beyond(state.layer_sites, self._computed_sites)
        if beyond is None:
            return None
        layer, site = beyond
        return AdapterFailed(
            f"adapter {state.digest} adapts site {site.label} of layer {layer}, which this engine does not compute; "
            "wanted an engine that does (a newer version)"
        )
