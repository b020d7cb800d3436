"""What tests of the adapter pool share: packed adapters in a store, a store that can be watched, broken and held up,
kernels by definition, and a listener that can be waited for.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinilora.kernels import reference
from infinilora.kernels.batch import SiteWeights
from infinilora.pool.pool import LeaseState
from infinilora.protocol import keys
from infinilora.protocol.adapter import BaseCard, Site, manifest_digest
from infinilora.protocol.errors import Unavailable
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import BlobStore
from infinilora.weights.ingest import ingest
from infinilora.weights.synth import write_peft_adapter
from support.deltas import Deltas, packed_deltas, rename_tensors

WAIT_S = 10.0


class Packed:
    """An adapter as ingest stored it, and its deltas in float64."""

    def __init__(self, digest: Digest, path: Path, card: BaseCard) -> None:
        self.digest = digest
        self.path = path
        self.card = card
        self.deltas: Deltas = packed_deltas(path, card)

    def delta(self, layer: int, site: Site, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """The whole site's delta of x [T, in], by the unpacked weights."""
        geometry = self.card.geometry()[layer, site]
        zeros = [np.zeros((part.out_dim, geometry.in_dim)) for part in geometry.parts]
        weights = [self.deltas.get(p.module, z) for p, z in zip(geometry.parts, zeros, strict=True)]
        return np.asarray(x.astype(np.float64) @ np.concatenate(weights).T)


def pack(
    work: Path,
    blobs: BlobStore,
    card: BaseCard,
    *,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] | None = None,
    dtype: str = "F32",
) -> Packed:
    """Make a random adapter, ingest it and put it into the store."""
    source = write_peft_adapter(work / f"peft-{seed}", card, rank=rank, targets=targets, seed=seed, dtype=dtype)
    path = work / f"packed-{seed}"
    digest = manifest_digest(ingest(source, card, path))
    blobs.put_file(keys.packed(digest), path)
    return Packed(digest, path, card)


def pack_some_experts(
    work: Path, blobs: BlobStore, card: BaseCard, *, seed: int, rank: int, without: Sequence[int]
) -> Packed:
    """As `pack`, of every module of the layers but those of some experts."""
    source = write_peft_adapter(work / f"peft-{seed}", card, rank=rank, seed=seed)
    absent = tuple(f".experts.{expert}." for expert in without)
    rename_tensors(source, {}, keep=lambda name: not any(part in name for part in absent))
    path = work / f"packed-{seed}"
    digest = manifest_digest(ingest(source, card, path))
    blobs.put_file(keys.packed(digest), path)
    return Packed(digest, path, card)


class WatchedBlobs:
    """A store seen through: counts ranged reads, can fail, and can hold readers at a gate. Is read ahead, as S3 is."""

    most_ahead_bytes = 8 << 20

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner
        self.reads: list[tuple[str, int, int]] = []
        self.failures_left = 0
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)

    def get_range(self, name: str, offset: int, num_bytes: int, *, etag: str | None = None) -> bytes:
        self._arrive(name, offset, num_bytes)
        return self.inner.get_range(name, offset, num_bytes, etag=etag)

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        self._arrive(name, offset, len(into))
        return self.inner.read_into(name, offset, into)

    def _arrive(self, name: str, offset: int, num_bytes: int) -> None:
        self.reads.append((name, offset, num_bytes))
        self.arrived.release()
        if not self.gate.wait(WAIT_S):
            raise TimeoutError("the test never opened the gate")
        if self.failures_left:
            self.failures_left -= 1
            raise Unavailable("the store is away, as the test wants it")

    def get(self, name: str, *, etag: str | None = None) -> bytes:
        return self.inner.get(name, etag=etag)

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        return self.inner.put(name, data, if_absent=if_absent)

    def put_file(self, name: str, path: Path, *, if_absent: bool = False) -> bool:
        return self.inner.put_file(name, path, if_absent=if_absent)

    def stat(self, name: str):  # type: ignore[no-untyped-def]  # whatever the inner one says
        return self.inner.stat(name)

    def list(self, prefix: str = "") -> list[str]:
        return self.inner.list(prefix)

    def delete(self, name: str) -> None:
        self.inner.delete(name)

    def deletion(self, name: str, *, within_s: int) -> Callable[[], None]:
        return self.inner.deletion(name, within_s=within_s)


class DefinedKernels:
    """SlotKernels by the reference's definition: what the pool's own tests compute with."""

    def __init__(self) -> None:
        self.bound: dict[tuple[int, int], dict[int, SiteWeights]] = {}
        self.on_bind: Callable[[int, int], None] = lambda slot, layer: None

    def native_step(self) -> None:
        """None: Python sees every call."""

    def bind(self, slot: int, layer: int, site: int, parts: SiteWeights, in_dim: int, out_dim: int) -> None:
        self.on_bind(slot, layer)
        self.bound.setdefault((layer, site), {})[slot] = parts

    def clear(self, slot: int) -> None:
        for slots in self.bound.values():
            slots.pop(slot, None)

    def dense(self, layer: int, site: int, segments: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        reference.dense(self.bound.get((layer, site), {}), segments, x, out, accumulate=accumulate)

    def dense_columns(
        self,
        layer: int,
        site: int,
        segments: Tensor,
        x: Tensor,
        out: Tensor,
        *,
        first: int,
        first_in: int | None = None,
        accumulate: bool = False,
    ) -> None:
        bound = self.bound.get((layer, site), {})
        reference.dense_columns(bound, segments, x, out, first=first, first_in=first_in, accumulate=accumulate)

    def embed(self, layer: int, segments: Tensor, ids: Tensor, out: Tensor, *, accumulate: bool) -> None:
        reference.embed(self.bound.get((layer, Site.EMBED), {}), segments, ids, out, accumulate=accumulate)

    def moe_gate_up(
        self, layer: int, segments: Tensor, x: Tensor, topk_ids: Tensor, out: Tensor, *, accumulate: bool
    ) -> None:
        bound = self.bound.get((layer, Site.MOE_GATE_UP), {})
        reference.moe_gate_up(bound, segments, x, topk_ids, out, accumulate=accumulate)

    def moe_down(
        self,
        layer: int,
        segments: Tensor,
        act: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        bound = self.bound.get((layer, Site.MOE_DOWN), {})
        reference.moe_down(bound, segments, act, topk_ids, topk_weights, out, accumulate=accumulate)


class Told:
    """Every state that a holder was told, in order."""

    def __init__(self) -> None:
        self.states: list[LeaseState] = []
        self._changed = threading.Condition()

    def __call__(self, state: LeaseState) -> None:
        with self._changed:
            self.states.append(state)
            self._changed.notify_all()

    def wait(self, is_it: Callable[[LeaseState], bool]) -> LeaseState:
        with self._changed:
            if not self._changed.wait_for(lambda: any(map(is_it, self.states)), WAIT_S):
                raise TimeoutError(f"told only {self.states}")
            return next(filter(is_it, self.states))

    def resident(self) -> LeaseState:
        state = self.wait(lambda s: s.is_resident or s.error is not None)
        if state.error:
            raise state.error
        return state

    def lost(self) -> Exception:
        error = self.wait(lambda s: s.error is not None).error
        assert error is not None
        return error


def rows_of(*counts: int, cols: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((sum(counts), cols), np.float32))
