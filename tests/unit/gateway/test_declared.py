"""The base model that an adapter's config names, against the one it is registered for."""

import pytest

from infinilora.gateway.declared import check_declared
from infinilora.protocol.errors import AdapterInvalid
from infinilora.protocol.ids import Fingerprint

ONE, TWO = Fingerprint("sha256:1"), Fingerprint("sha256:2")
KNOWN: dict[str, Fingerprint | None] = {"llama-one": ONE, "Llama-Two": TWO, "org/far": None, "prod": ONE}


@pytest.mark.parametrize(
    "declared", ["", "llama-one", "LLAMA-ONE", "hub/llama-one", "/home/joe/llama-one/", "prod", "unheard/of", "/"]
)
def test_a_name_that_is_ours_or_unknown_says_nothing(declared: str) -> None:
    assert check_declared(declared, ONE, KNOWN, "refuse") == ()


@pytest.mark.parametrize("declared", ["llama-two", "hub/Llama-Two", "/models/llama-two", "org/far", "ORG/FAR/"])
def test_a_name_of_another_base_is_warned_of_or_refused_as_the_operator_says(declared: str) -> None:
    (warning,) = check_declared(declared, ONE, KNOWN, "warn")
    assert warning.code == "declared_base"
    assert declared in warning.text
    assert "'llama-one'" in warning.text
    with pytest.raises(AdapterInvalid, match="INFINILORA_DECLARED_BASE"):
        check_declared(declared, ONE, KNOWN, "refuse")
    assert check_declared(declared, ONE, KNOWN, "ignore") == ()


def test_the_whole_name_counts_more_than_its_last_part() -> None:
    known: dict[str, Fingerprint | None] = {"org/base": ONE, "base": TWO}
    assert check_declared("org/base", ONE, known, "refuse") == ()
    assert check_declared("elsewhere/base", ONE, known, "warn")
