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
    __slots__ = ("protocol_version", "engine_id", "incarnation", "base_fingerprint", "dtype", "max_rows", "offers", "sites", "scales_columns")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BASE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    SCALES_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    engine_id: str
    incarnation: str
    base_fingerprint: str
    dtype: str
    max_rows: int
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    sites: int
    scales_columns: bool
    def __init__(self, protocol_version: _Optional[int] = ..., engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., base_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., max_rows: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., sites: _Optional[int] = ..., scales_columns: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "group", "incarnation", "chosen", "secret")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    group: str
    incarnation: str
    chosen: Offer
    secret: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., group: _Optional[str] = ..., incarnation: _Optional[str] = ..., chosen: _Optional[_Union[Offer, _Mapping]] = ..., secret: _Optional[bytes] = ...) -> None: ...

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
