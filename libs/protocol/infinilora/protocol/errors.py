"""The one tree of errors, and how each looks to a client or a peer.

    InfiniLoraError
    ├── InvalidRequest          invalid_request          400
    │   ├── ContextLengthExceeded  context_length_exceeded 400
    │   ├── Conflict            conflict                 409
    │   ├── TooLarge            request_too_large        413
    │   └── Unauthenticated     invalid_api_key          401
    ├── AdapterError
    │   ├── AdapterNotFound     adapter_not_found        404
    │   ├── SourceNotFound      source_not_found         404
    │   ├── AdapterForbidden    adapter_forbidden        403
    │   ├── AdapterInvalid      adapter_invalid          422
    │   ├── AdapterFailed       adapter_failed           424   retryable
    │   └── AdapterLoading      adapter_loading          503   retryable, Retry-After
    ├── ModelNotFound           model_not_found          404
    ├── RateLimited             rate_limited             429   retryable, Retry-After
    ├── Overloaded              overloaded               503   retryable, Retry-After
    ├── FeatureOff              feature_off              403   an operator switched it off
    ├── Unavailable             unavailable              503   retryable, Retry-After   a dependency is away
    │   ├── StoreRefused        store_refused            503   retryable, Retry-After
    │   └── StoreFull           store_full               507   retryable
    ├── DeadlineExceeded        deadline_exceeded        504   retryable
    ├── StaleEpoch              stale_epoch              409   a deposed leader spoke
    └── Internal                internal                 500

A leaf's `code` is stable: clients and peers match on it. The message says what was found, what was wanted
and what to do. Between processes an error travels as a `WireError`: `to_wire`, `from_wire`.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec


class WireError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it crosses a process boundary."""

    code: str
    message: str
    retryable: bool = False
    retry_after_s: float | None = None
    param: str | None = None


class InfiniLoraError(Exception):
    """Anything this system raises on purpose. Leaves carry `code`, `http_status` and `retryable`."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_wire(self) -> WireError:
        return WireError(
            code=self.code,
            message=self.message,
            retryable=self.retryable,
            retry_after_s=self.retry_after_s,
            param=self.param,
        )


class InvalidRequest(InfiniLoraError):
    """The caller's words are wrong; the same call will fail again."""

    code = "invalid_request"
    http_status = 400


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested tokens do not fit the model."""

    code = "context_length_exceeded"


class Conflict(InvalidRequest):
    """The name is taken, or the record changed under the caller."""

    code = "conflict"
    http_status = 409


class TooLarge(InvalidRequest):
    """The body is larger than this service reads."""

    code = "request_too_large"
    http_status = 413


class Unauthenticated(InvalidRequest):
    """No key, or one that is not known."""

    code = "invalid_api_key"
    http_status = 401


class AdapterError(InfiniLoraError):
    """The request named an adapter that cannot serve it."""


class AdapterNotFound(AdapterError):
    """No adapter of this name under this tenant."""

    code = "adapter_not_found"
    http_status = 404


class SourceNotFound(AdapterError):
    """Where the adapter's files should be, there is no adapter; the message names the file that was looked for."""

    code = "source_not_found"
    http_status = 404


class AdapterForbidden(AdapterError):
    """The adapter exists and this caller may not use it."""

    code = "adapter_forbidden"
    http_status = 403


class AdapterInvalid(AdapterError):
    """The adapter's files cannot be served exactly; the message names file, tensor, found, wanted."""

    code = "adapter_invalid"
    http_status = 422


class AdapterFailed(AdapterError):
    """The adapter was valid once and could not be fetched, verified or computed now."""

    code = "adapter_failed"
    http_status = 424
    retryable = True


class AdapterLoading(AdapterError):
    """The adapter is on its way; ask again after `retry_after_s`."""

    code = "adapter_loading"
    http_status = 503
    retryable = True


class ModelNotFound(InfiniLoraError):
    """No base model of this name is served."""

    code = "model_not_found"
    http_status = 404


class RateLimited(InfiniLoraError):
    """The caller's own limit."""

    code = "rate_limited"
    http_status = 429
    retryable = True


class Overloaded(InfiniLoraError):
    """The system's limit: queue full, no engine with room."""

    code = "overloaded"
    http_status = 503
    retryable = True


class FeatureOff(InfiniLoraError):
    """This service can do it and its operator does not let it; the message names the setting."""

    code = "feature_off"
    http_status = 403


class Unavailable(InfiniLoraError):
    """Something this call needs is away: broker, store, engine, LoRA server."""

    code = "unavailable"
    http_status = 503
    retryable = True


class StoreRefused(Unavailable):
    """The object store answered and does not let us in. The message names no host, bucket, key or secret."""

    code = "store_refused"


class StoreFull(Unavailable):
    """The object store or a disk has no room for what was to be written."""

    code = "store_full"
    http_status = 507


class DeadlineExceeded(InfiniLoraError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    http_status = 504
    retryable = True


class StaleEpoch(InfiniLoraError):
    """A command of a leader that is no longer the leader."""

    code = "stale_epoch"
    http_status = 409


class Internal(InfiniLoraError):
    """A fault of ours."""


def _leaves(cls: type[InfiniLoraError]) -> Iterator[type[InfiniLoraError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _leaves(child)


def from_wire(error: WireError) -> InfiniLoraError:
    """Rebuild the error a peer raised; an unknown code becomes `Internal` and keeps its words."""
    kinds: dict[str, type[InfiniLoraError]] = {
        leaf.code: leaf for leaf in reversed(list(_leaves(InfiniLoraError))) if "code" in vars(leaf)
    }
    kind: type[InfiniLoraError] = kinds.get(error.code, Internal)
    kwargs: dict[str, Any] = {"param": error.param, "retry_after_s": error.retry_after_s}
    return kind(error.message, **kwargs)
