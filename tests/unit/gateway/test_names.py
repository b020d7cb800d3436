"""What a `model` field may be."""

import pytest

from infinilora.gateway.names import AdapterRef, BaseRef, parse_model
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import Digest

DIGEST = Digest("sha256:" + "0" * 63 + "1")


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("a1", AdapterRef(None, "a1", None, None)),
        ("team/a1", AdapterRef("team", "a1", None, None)),
        ("a1@v3", AdapterRef(None, "a1", 3, None)),
        (f"team/a1@{DIGEST}", AdapterRef("team", "a1", None, DIGEST)),
        ("base:org/model", BaseRef("org/model")),
    ],
)
def test_names_are_read(text: str, ref: AdapterRef | BaseRef) -> None:
    assert parse_model(text) == ref


@pytest.mark.parametrize(
    "text",
    [
        *("../x", "..%2fx", "/abs/path", "a/../../t2/b", "a\\..\\b", "a\0b", "....//x", "a b", "a/b/c"),
        *("a@", "a@v0", "a@latest", "a@sha256:12", "", "x" * 10_000, "ünï-适配器"),
    ],
)
def test_what_cannot_be_a_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_model(text)
    assert refusal.value.param == "model"
    assert len(refusal.value.message) < 400
