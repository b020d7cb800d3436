"""Errors: every leaf keeps its code and status, in the drawn tree, over the wire, to HTTP readers and to gRPC peers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinilora.protocol import errors
from infinilora.protocol.errors import InfiniLoraError, from_wire
from infinilora.runtime import rpc

HTTP_API = Path(__file__).parents[3] / "docs" / "http-api.md"


def _below(kind: type[InfiniLoraError]) -> Iterator[type[InfiniLoraError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


LEAVES = [kind for kind in _below(InfiniLoraError) if kind.__module__ == errors.__name__ and "code" in vars(kind)]


@pytest.mark.parametrize(
    ("name", "code", "status", "retryable"),
    [
        ("SourceNotFound", "source_not_found", 404, False),
        ("FeatureOff", "feature_off", 403, False),
        ("StoreRefused", "store_refused", 503, True),
        ("StoreFull", "store_full", 507, True),
    ],
)
def test_a_peer_rebuilds_what_was_raised(name: str, code: str, status: int, retryable: bool) -> None:
    raised = getattr(errors, name)("no room: found 0 bytes, wanted 12", retry_after_s=2.0)
    rebuilt = from_wire(raised.to_wire())
    assert (type(rebuilt).__name__, rebuilt.code, rebuilt.http_status) == (name, code, status)
    assert (rebuilt.message, rebuilt.retryable, rebuilt.retry_after_s) == (raised.message, retryable, 2.0)


def test_a_store_that_refuses_is_handled_where_a_store_that_is_away_is() -> None:
    with pytest.raises(errors.Unavailable):
        raise errors.StoreRefused("the store does not accept these credentials")


def test_no_two_errors_share_a_code() -> None:
    codes = [kind.code for kind in LEAVES]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.code)
def test_the_drawn_tree_shows_every_leaf(kind: type[InfiniLoraError]) -> None:
    assert errors.__doc__ is not None
    assert re.search(rf"── {kind.__name__} +{kind.code} +{kind.http_status}\b", errors.__doc__)


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.code)
def test_every_leaf_has_a_grpc_status(kind: type[InfiniLoraError]) -> None:
    assert kind.http_status in rpc._STATUS_OF_HTTP


@pytest.mark.parametrize("kind", [k for k in LEAVES if k is not errors.StaleEpoch], ids=lambda kind: kind.code)
def test_the_http_reference_lists_every_code_with_its_status(kind: type[InfiniLoraError]) -> None:
    """`stale_epoch` is said between processes only. Several codes may share the status that follows them."""
    listed = HTTP_API.read_text().split("## Errors", 1)[1].split("`type` says", 1)[0]
    found = re.search(rf"`{kind.code}`[^0-9]*?(\d{{3}})", listed)
    assert found is not None
    assert int(found.group(1)) == kind.http_status
