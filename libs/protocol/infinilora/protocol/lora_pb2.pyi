from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Offer(_message.Message):
    __slots__ = ("backend", "details")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    backend: str
    details: _containers.ScalarMap[str, str]
    def __init__(self, backend: _Optional[str] = ..., details: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "engine_id", "incarnation", "base_fingerprint", "dtype", "max_rows", "offers", "sites", "scales_columns", "opens_shards")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BASE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    SCALES_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    OPENS_SHARDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    engine_id: str
    incarnation: str
    base_fingerprint: str
    dtype: str
    max_rows: int
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    sites: int
    scales_columns: bool
    opens_shards: bool
    def __init__(self, protocol_version: _Optional[int] = ..., engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., base_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., max_rows: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., sites: _Optional[int] = ..., scales_columns: _Optional[bool] = ..., opens_shards: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "group", "incarnation", "chosen", "secret", "shape", "shards")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    group: str
    incarnation: str
    chosen: Offer
    secret: bytes
    shape: str
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, protocol_version: _Optional[int] = ..., group: _Optional[str] = ..., incarnation: _Optional[str] = ..., chosen: _Optional[_Union[Offer, _Mapping]] = ..., secret: _Optional[bytes] = ..., shape: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class LeaseRelease(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class LeaseGranted(_message.Message):
    __slots__ = ("digest", "slot", "slot_generation", "layer_sites", "scaled_sites")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYER_SITES_FIELD_NUMBER: _ClassVar[int]
    SCALED_SITES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    slot: int
    slot_generation: int
    layer_sites: _containers.RepeatedScalarFieldContainer[int]
    scaled_sites: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digest: _Optional[str] = ..., slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., layer_sites: _Optional[_Iterable[int]] = ..., scaled_sites: _Optional[_Iterable[int]] = ...) -> None: ...

class ColumnScale(_message.Message):
    __slots__ = ("digest", "slot", "slot_generation", "layer", "site", "factors")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    slot: int
    slot_generation: int
    layer: int
    site: int
    factors: bytes
    def __init__(self, digest: _Optional[str] = ..., slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., layer: _Optional[int] = ..., site: _Optional[int] = ..., factors: _Optional[bytes] = ...) -> None: ...

class LayersReady(_message.Message):
    __slots__ = ("digest", "slot", "slot_generation", "count")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    digest: str
    slot: int
    slot_generation: int
    count: int
    def __init__(self, digest: _Optional[str] = ..., slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class LeaseFailed(_message.Message):
    __slots__ = ("digest", "code", "message")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    code: str
    message: str
    def __init__(self, digest: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("hello", "lease", "release", "ready")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    lease: LeaseRequest
    release: LeaseRelease
    ready: Ready
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., lease: _Optional[_Union[LeaseRequest, _Mapping]] = ..., release: _Optional[_Union[LeaseRelease, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("welcome", "granted", "layers", "failed", "scale")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    granted: LeaseGranted
    layers: LayersReady
    failed: LeaseFailed
    scale: ColumnScale
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., granted: _Optional[_Union[LeaseGranted, _Mapping]] = ..., layers: _Optional[_Union[LayersReady, _Mapping]] = ..., failed: _Optional[_Union[LeaseFailed, _Mapping]] = ..., scale: _Optional[_Union[ColumnScale, _Mapping]] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ("protocol_version", "group", "base_fingerprint", "shape", "shard", "where", "pool_bytes", "num_slots")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BASE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    group: str
    base_fingerprint: str
    shape: str
    shard: int
    where: Shard
    pool_bytes: int
    num_slots: int
    def __init__(self, protocol_version: _Optional[int] = ..., group: _Optional[str] = ..., base_fingerprint: _Optional[str] = ..., shape: _Optional[str] = ..., shard: _Optional[int] = ..., where: _Optional[_Union[Shard, _Mapping]] = ..., pool_bytes: _Optional[int] = ..., num_slots: _Optional[int] = ...) -> None: ...

class StageSlot(_message.Message):
    __slots__ = ("digest", "slot", "slot_generation", "starts")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    slot: int
    slot_generation: int
    starts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digest: _Optional[str] = ..., slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., starts: _Optional[_Iterable[int]] = ...) -> None: ...

class EmptySlot(_message.Message):
    __slots__ = ("slot", "slot_generation")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_generation: int
    def __init__(self, slot: _Optional[int] = ..., slot_generation: _Optional[int] = ...) -> None: ...

class ForgetDigest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class ShardReady(_message.Message):
    __slots__ = ("slot", "slot_generation", "count", "tier", "scales")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_generation: int
    count: int
    tier: str
    scales: _containers.RepeatedCompositeFieldContainer[ColumnScale]
    def __init__(self, slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., count: _Optional[int] = ..., tier: _Optional[str] = ..., scales: _Optional[_Iterable[_Union[ColumnScale, _Mapping]]] = ...) -> None: ...

class ShardFailed(_message.Message):
    __slots__ = ("slot", "slot_generation", "code", "message")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_generation: int
    code: str
    message: str
    def __init__(self, slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ShardEmptied(_message.Message):
    __slots__ = ("slot", "slot_generation")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_generation: int
    def __init__(self, slot: _Optional[int] = ..., slot_generation: _Optional[int] = ...) -> None: ...

class ShardLeaves(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FollowerMessage(_message.Message):
    __slots__ = ("follow", "ready", "failed", "emptied", "leaves")
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EMPTIED_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    follow: Follow
    ready: ShardReady
    failed: ShardFailed
    emptied: ShardEmptied
    leaves: ShardLeaves
    def __init__(self, follow: _Optional[_Union[Follow, _Mapping]] = ..., ready: _Optional[_Union[ShardReady, _Mapping]] = ..., failed: _Optional[_Union[ShardFailed, _Mapping]] = ..., emptied: _Optional[_Union[ShardEmptied, _Mapping]] = ..., leaves: _Optional[_Union[ShardLeaves, _Mapping]] = ...) -> None: ...

class HeadMessage(_message.Message):
    __slots__ = ("welcome", "stage", "empty", "forget")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    stage: StageSlot
    empty: EmptySlot
    forget: ForgetDigest
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., stage: _Optional[_Union[StageSlot, _Mapping]] = ..., empty: _Optional[_Union[EmptySlot, _Mapping]] = ..., forget: _Optional[_Union[ForgetDigest, _Mapping]] = ...) -> None: ...
