"""What a pool is made from, and what it says of itself: the same for a pool that decides and for one that obeys."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from infinilora.pool.backoff import RETRY_S
from infinilora.pool.cache import DiskCache
from infinilora.pool.device import Device, HostDevice
from infinilora.pool.execute import SiteKernels
from infinilora.pool.host import HostTier
from infinilora.pool.loader import Binder
from infinilora.pool.share import Share
from infinilora.pool.tenancy import Limits
from infinilora.pool.tiers import Tiers
from infinilora.protocol.adapter import Manifest
from infinilora.protocol.control import LoadFailure
from infinilora.protocol.errors import AdapterFailed
from infinilora.protocol.ids import Digest, Fingerprint
from infinilora.runtime.blob_store import BlobStore


class PoolKernels(Binder, SiteKernels, Protocol):
    """What the pool needs of `kernels.SlotKernels`."""

    def clear(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How large a pool is and where it reads. `num_layers` is the base's, without lm_head.

    `cache_dir` may be shared with other processes. `host_bytes`: 0 for no tier in host memory, which on a CPU would
    only hold twice what the pool and the page cache hold already. Threads: `loader_threads` for what this host has,
    `fetch_threads` for what waits for the store.
    """

    base: Fingerprint
    num_layers: int
    capacity_bytes: int
    num_slots: int
    cache_dir: Path
    cache_bytes: int
    host_bytes: int = 0
    loader_threads: int = 2
    fetch_threads: int = 4
    load_share: float = 1.0
    """Of one core, for all loads together, while rows of resident adapters are served; 1: loads never wait."""
    device: Device = field(default_factory=HostDevice)
    retry_s: float = RETRY_S
    """How long an adapter that failed is left alone at first (backoff.py)."""
    limits: Limits = field(default_factory=Limits)
    share: Share | None = None
    """What of each adapter this process holds, as a shard of a group; None: all of it."""

    def misfit(self, digest: Digest, manifest: Manifest) -> AdapterFailed | None:
        """Why this pool cannot serve an adapter: it is of another base."""
        if manifest.base != self.base:
            return AdapterFailed(f"adapter {digest} is of base {manifest.base}; this pool serves {self.base}")
        if manifest.num_layers != self.num_layers:
            return AdapterFailed(f"adapter {digest} has {manifest.num_layers} layers, the base {self.num_layers}")
        return None

    def tiers(self, blobs: BlobStore) -> Tiers:
        """Where adapters come from: memory and disk of this host, then the store."""
        host = HostTier(self.host_bytes, is_pinned=not self.device.is_host) if self.host_bytes else None
        return Tiers(blobs, DiskCache(self.cache_dir, self.cache_bytes), host, self.share)


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """How full the pool is, and how each adapter that it has to do with fares. `loading`: or waiting for room."""

    bytes_total: int
    bytes_free: int
    leases: int
    waiting: int
    resident: tuple[Digest, ...]
    loading: tuple[Digest, ...] = ()
    failed: tuple[LoadFailure, ...] = ()
    pinned: tuple[Digest, ...] = ()
