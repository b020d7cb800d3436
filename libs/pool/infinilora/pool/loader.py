"""Brings adapters into the pool's memory, layer by layer, on a few threads. Decides nothing about slots.

A *load* is one digest on its way: first *sized* (its manifest read), then it rests until it is given memory, then its
layers come, verified and bound, one by one. There is one load for a digest at a time. A thread takes a load for one
piece of work (the manifest, or one layer) and puts it behind the others, so that a large adapter never keeps a small
one waiting for longer than a layer. A load that nobody wants is cancelled between two layers. Between two layers a load
also rests, for as long as `Pace` says, so that those who use resident adapters hardly notice it.

There are two lanes, each with threads of its own: *near* for what this host has, *far* for what waits for the store. A
load begins near and changes over once. So a store that hangs never holds up an adapter that is in the cache.

Callbacks come from the loader's threads with no lock of the loader held.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from torch import Tensor

from infinilora.kernels.allocation import is_out_of_memory
from infinilora.kernels.batch import SiteWeights
from infinilora.pool.bind import site_weights
from infinilora.pool.device import Device, HostDevice
from infinilora.pool.pace import Pace
from infinilora.pool.tiers import NotNear, PackedSource, Tiers
from infinilora.protocol.errors import AdapterFailed, InfiniLoraError, Overloaded, Unavailable
from infinilora.protocol.ids import Digest
from infinilora.weights.packed import PackedHeader, packed_ranges

logger = logging.getLogger(__name__)

RETRY_AFTER_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Pauses between attempts while the store is unavailable, at most; then the load fails. Progress starts them anew."""


class Lanes(NamedTuple):
    """How many threads each lane has. Those of the far one mostly wait."""

    near: int
    far: int


class Binder(Protocol):
    """The part of SlotKernels that a loader needs."""

    def bind(self, slot: int, layer: int, site: int, parts: SiteWeights, in_dim: int, out_dim: int) -> None: ...


class LoadListener(Protocol):
    """Who is told what becomes of loads. Every load ends in exactly one `failed`, `stopped` or last `layer_ready`."""

    def sized(self, digest: Digest, header: PackedHeader) -> None: ...
    def layer_ready(self, target: "Target", count: int, tier: str) -> None: ...
    def failed(self, digest: Digest, error: InfiniLoraError) -> None: ...
    def stopped(self, target: "Target") -> None:
        """A cancelled load that was at work has let go of its memory."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where a load goes: a tenancy of a slot, and memory for each layer (uint8; empty where nothing is adapted)."""

    slot: int
    slot_generation: int
    layers: Sequence[Tensor]


@dataclass(slots=True)
class _Load:
    digest: Digest
    source: PackedSource | None = None
    target: Target | None = None
    next_layer: int = 0
    attempts: int = 0
    opening_s: float = 0.0
    """Processor time that it took to open, which the pace has not heard of yet."""
    is_far: bool = False
    is_resting: bool = False
    is_running: bool = False
    is_cancelled: bool = False


@dataclass(order=True, slots=True)
class _Turn:
    not_before: float
    number: int
    load: _Load = field(compare=False)


@dataclass(slots=True)
class _Lane:
    """Loads that wait for a thread, a heap. Somebody `idle` waits for the first of them, unless all are at work."""

    idle: threading.Condition
    turns: list[_Turn] = field(default_factory=list)


class Loader:
    """`_loads` holds every load that may still call back; each is resting, in its lane's heap, or with a thread.

    A thread that puts a load back looks for the next itself and wakes nobody: a load that is alone stays with it.
    """

    def __init__(
        self,
        tiers: Tiers,
        kernels: Binder,
        listener: LoadListener,
        *,
        lanes: Lanes,
        on_death: Callable[[BaseException], None],
        pace: Pace | None = None,
        device: Device | None = None,
    ) -> None:
        self._tiers = tiers
        self._device = device or HostDevice()
        self._pace = pace or Pace()
        self._kernels = kernels
        self._listener = listener
        self._on_death = on_death
        self._lock = threading.Lock()
        self._loads: dict[Digest, _Load] = {}
        self._lanes = tuple(_Lane(threading.Condition(self._lock)) for _ in lanes)
        self._num_turns = 0
        self._num_stopping = 0
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"loader-{name}-{i}", daemon=True)
            for lane, name, count in zip(self._lanes, lanes._fields, lanes, strict=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def want(self, digest: Digest) -> None:
        """Read the manifest; `sized` or `failed` follows. Does nothing if the digest is on its way already."""
        with self._lock:
            if digest not in self._loads:
                self._loads[digest] = load = _Load(digest)
                self._schedule(load)

    def stage(self, digest: Digest, target: Target) -> None:
        """Give the digest's load its memory: `layer_ready` follows for each layer."""
        with self._lock:
            load = self._loads.get(digest)
            if load is None:
                self._loads[digest] = load = _Load(digest)
                self._schedule(load)
            assert load.target is None
            load.target = target
            if load.is_resting:
                load.is_resting = False
                self._schedule(load)

    def cancel(self, digest: Digest) -> bool:
        """Nobody wants it. True: no thread touches its memory from now on; False: `stopped` will say when."""
        with self._lock:
            load = self._loads.pop(digest, None)
            if load is None:
                return True
            load.is_cancelled = True
            if load.is_running:
                self._num_stopping += 1
                return load.target is None
        _close(load)
        return True

    def close(self) -> None:
        """Stop the threads; no callback comes after this returns."""
        with self._lock:
            self._is_closing = True
            for lane in self._lanes:
                lane.idle.notify_all()
        for thread in self._threads:
            thread.join()
        for load in self._loads.values():
            _close(load)
        self._loads.clear()

    @property
    def num_loads(self) -> int:
        """Loads that have not ended, resting ones and those still stopping included."""
        with self._lock:
            return len(self._loads) + self._num_stopping

    def _schedule(self, load: _Load, pause_s: float = 0.0, *, looks_itself: bool = False) -> None:
        """Put it into its lane. `looks_itself`: the calling thread is of that lane and will take what is next."""
        self._num_turns += 1
        lane = self._lanes[load.is_far]
        heappush(lane.turns, _Turn(time.monotonic() + pause_s, self._num_turns, load))
        if not looks_itself:
            lane.idle.notify()

    def _run(self, lane: _Lane) -> None:
        try:
            while load := self._next(lane):
                self._work(load)
        except BaseException as error:
            self._on_death(error)
            raise

    def _next(self, lane: _Lane) -> _Load | None:
        turns = lane.turns
        with self._lock:
            while not self._is_closing:
                pause_s = turns[0].not_before - time.monotonic() if turns else None
                if pause_s is None or pause_s > 0:
                    lane.idle.wait(pause_s)
                    continue
                load = heappop(turns).load
                if load.is_cancelled:
                    continue
                if turns:  # another must wait for these now
                    lane.idle.notify()
                load.is_running = True
                return load
        return None

    def _work(self, load: _Load) -> None:
        try:
            if load.source is None:
                opened = self._tiers.open_far if load.is_far else self._tiers.open_near
                started = time.thread_time()
                load.source = source = opened(load.digest)
                load.attempts, load.opening_s = 0, time.thread_time() - started
                if self._end_turn(load):
                    self._listener.sized(load.digest, source.whole)
            else:
                assert load.target is not None
                self._load_layer(load, load.source, load.target)
        except NotNear:
            load.is_far = True
            self._end_turn(load, looks_itself=False)
        except Unavailable as error:
            self._try_again(load, error)
        except InfiniLoraError as error:
            self._fail(load, error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._fail(load, Overloaded(f"no memory to load adapter {load.digest}: {error}", retry_after_s=1.0))
        except ValueError as error:
            self._fail(load, AdapterFailed(f"adapter {load.digest} does not fit this base: {error}"))

    def _load_layer(self, load: _Load, source: PackedSource, target: Target) -> None:
        layer, started = load.next_layer, time.thread_time()
        data = target.layers[layer]
        _read_layer(source, layer, data, self._device)
        at = 0
        for entry, _, num_bytes in packed_ranges(source.header, layer):
            parts = site_weights(entry, source.header.manifest.dtype, data[at : at + num_bytes])
            self._kernels.bind(target.slot, layer, entry.site, parts, entry.in_dim, entry.out_dim)
            at += num_bytes
        load.next_layer, load.attempts = layer + 1, 0
        is_last = load.next_layer == len(target.layers)
        if load.is_cancelled:
            self._end_turn(load)
            return
        self._listener.layer_ready(target, load.next_layer, source.tier)
        if is_last:
            source.commit()
        self._end_turn(load, pause_s=self._rest_s(load, target, time.thread_time() - started), is_last=is_last)

    def _rest_s(self, load: _Load, target: Target, spent_s: float) -> float:
        """What resident traffic is owed for a layer that took this processor time; after the last one others pay it.

        Waiting for a store or a device takes nothing from anybody.
        """
        now, sizes = time.monotonic(), [layer.numel() for layer in target.layers]
        with self._lock:
            num_bytes, spent_s, load.opening_s = sizes[load.next_layer - 1], spent_s + load.opening_s, 0.0
            pause_s = self._pace.pause_s(num_bytes, spent_s, now, total_bytes=sum(sizes))
        return pause_s if any(sizes[load.next_layer :]) else 0.0

    def _try_again(self, load: _Load, error: Unavailable) -> None:
        if load.attempts >= len(RETRY_AFTER_S):
            self._fail(load, error)
            return
        load.attempts += 1
        # Many who wait for the same store do not come back to it all at once.
        pause_s = RETRY_AFTER_S[load.attempts - 1] * (0.5 + secrets.randbelow(1000) / 2000)
        logger.info("store unavailable", extra={"adapter_id": load.digest, "pause_s": pause_s, "reason": str(error)})
        self._end_turn(load, pause_s=pause_s)

    def _fail(self, load: _Load, error: InfiniLoraError) -> None:
        logger.warning("load failed", extra={"adapter_id": load.digest, "code": error.code, "reason": str(error)})
        if self._end_turn(load, is_last=True):
            self._listener.failed(load.digest, error)

    def _end_turn(self, load: _Load, *, pause_s: float = 0.0, is_last: bool = False, looks_itself: bool = True) -> bool:
        """The thread lets go of the load; False if it was cancelled meanwhile (then `stopped` has been called).

        A load with nothing to do before it is given memory rests.
        """
        with self._lock:
            load.is_running = False
            is_cancelled = load.is_cancelled
            if is_cancelled:
                self._num_stopping -= 1
            elif is_last:
                del self._loads[load.digest]
            elif load.source is None or load.target is not None:
                self._schedule(load, pause_s, looks_itself=looks_itself)
            else:
                load.is_resting = True
        if is_cancelled or is_last:
            _close(load)
        if is_cancelled and load.target is not None:
            self._listener.stopped(load.target)
        return not is_cancelled


def _close(load: _Load) -> None:
    if load.source:
        load.source.close()
        load.source = None


def _read_layer(source: PackedSource, layer: int, target: Tensor, device: Device) -> None:
    """Read into the pool's memory: out of the host tier if there is one, else straight on a host or through a buffer.

    When it returns the layer is there: a device's copy is waited for, so that ready means ready for every stream.
    """
    held = source.hold_layer(layer)
    if held is None and device.is_host:
        source.read_layer(layer, target.numpy().data)
        return
    if held is None:
        held = device.host_buffer(target.numel())
        source.read_layer(layer, held.numpy().data)
    device.fill(target, held).wait()
