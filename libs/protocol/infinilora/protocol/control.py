"""Control messages: what goes over NATS, as JSON that an operator can read with `nats sub`.

Commands are request/reply, idempotent, and carry the leader's epoch. Events may be lost and are repaired
by state. Nothing here knows a subject (subjects.py) or a socket.
"""

from typing import Literal

import msgspec

from infinilora.protocol.errors import WireError
from infinilora.protocol.ids import PROTOCOL_VERSION, Digest, Fingerprint

ProcessKind = Literal["gateway", "engine", "lora-server", "coordinator"]
ProcessState = Literal["starting", "ready", "draining", "stuck"]
"""`stuck`: something in it does not move any more; it ends within moments (watchdog.py)."""


class LoadFailure(msgspec.Struct, frozen=True):
    """An adapter that a process could not load when it last tried, and why: an error's code and words."""

    digest: Digest
    code: str
    message: str


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """How busy an engine is. Counts of sequences, and KV blocks of the engine's own size."""

    running: int = 0
    waiting: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    digests: tuple[Digest, ...] = ()
    """Adapters this engine holds a lease on now."""
    resident: tuple[Digest, ...] = ()
    """Adapters in a pool of its own, where it has one; leased or not."""
    loading: tuple[Digest, ...] = ()
    failed: tuple[LoadFailure, ...] = ()
    """As of a group."""


class GroupLoad(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """How full a LoRA server group is, and what it holds."""

    bytes_free: int = 0
    bytes_total: int = 0
    leases: int = 0
    resident: tuple[Digest, ...] = ()
    loading: tuple[Digest, ...] = ()
    """Adapters on their way in, or waiting for room."""
    failed: tuple[LoadFailure, ...] = ()
    """What it could not load when it last tried: the latest, at most so many as backoff.py says."""
    pinned: tuple[Digest, ...] = ()
    """What it was told to keep, by whoever led; resident or not."""
    shape: str = "1x1"
    """expert_parallel x layer_parallel: the processes that are one group. Only the head beats, once all are there."""
    rows_per_s: float = 0.0
    """Rows of one site that it computes in a second, measured when it started; to be held against other groups of its
    base (speeds.py). 0: not told."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat. `incarnation` is new in each life of a process; `seq` counts beats of one life."""

    kind: ProcessKind
    id: str
    incarnation: str
    seq: int
    state: ProcessState
    address: str = ""
    """host:port of the process's gRPC (engine, lora-server) or HTTP (gateway, coordinator) server."""
    base: Fingerprint | None = None
    model: str = ""
    """The base model's served name."""
    group: str = ""
    away: tuple[str, ...] = ()
    """What this process needs and does not reach now: `store` (the object store), `redis`. It serves what it has."""
    load: EngineLoad | GroupLoad | None = None
    protocol_version: int = PROTOCOL_VERSION


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """A hint: have this adapter resident."""

    digest: Digest
    over: tuple[Digest, ...] = ()
    """What was staged by a hint before and is not wanted there any more: any of these may go for it."""


class Evict(msgspec.Struct, frozen=True, kw_only=True, tag="evict"):
    """A hint: give the slot up when no lease is on it."""

    digest: Digest


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """Drop an adapter from every tier of this process once no lease is on it. Idempotent; not resident is done."""

    digest: Digest


class Pin(msgspec.Struct, frozen=True, kw_only=True, tag="pin"):
    """Keep (or stop keeping) an adapter resident whatever its heat."""

    digest: Digest
    pinned: bool


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Take no new work; finish what runs."""

    draining: bool = True


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A leader's order to one process. A receiver refuses an epoch lower than one it has seen."""

    command_id: str
    epoch: int
    body: Stage | Evict | Pin | Drain | Forget


class CommandReply(msgspec.Struct, frozen=True, kw_only=True):
    """`error` is None when the command was taken."""

    command_id: str
    error: WireError | None = None


class AdapterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A name changed: `put` (new current digest), `delete`, or `alias` (this other name now means `digest`)."""

    action: Literal["put", "delete", "alias"]
    tenant: str
    name: str
    revision: int
    digest: Digest


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Which group holds what, for one base: the whole of it, as a reader puts it together from head and parts."""

    base: Fingerprint
    epoch: int
    revision: int
    groups: dict[str, tuple[Digest, ...]]


class PlacementHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the store holds of a placement besides its parts. Written by the leading coordinator only."""

    base: Fingerprint
    epoch: int
    revision: int
    parts: dict[str, int]
    """Group -> the revision that its part was written with."""


class PlacementPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one group holds, written in the same step as the head of this revision."""

    revision: int
    digests: tuple[Digest, ...]


class PlacementChange(msgspec.Struct, frozen=True, kw_only=True):
    """A placement has changed: what became of revision `before`. Without `added`, the store has to be read."""

    base: Fingerprint
    epoch: int
    revision: int
    before: int
    added: dict[str, tuple[Digest, ...]] | None = None
    """Group -> what it holds more. A group that is new is here, even if it holds nothing."""
    removed: dict[str, tuple[Digest, ...]] = {}
    gone: tuple[str, ...] = ()
    """Groups that are not in the placement any more."""


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's word that this life of a process is over. Should it go on, it goes on as a new one."""

    kind: ProcessKind
    id: str
    incarnation: str
    epoch: int


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request, for whoever bills or learns from it (JetStream, durable)."""

    request_id: str
    tenant: str
    model: str
    digest: Digest | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    degraded: bool = False
    """Base output stood in for the adapter's, as the request allowed."""
