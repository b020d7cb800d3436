"""API keys, and places in the house."""

import pytest

from infinilora.gateway.admission import Admission
from infinilora.gateway.tenants import Tenants, parse_keys
from infinilora.protocol.errors import InvalidRequest, Overloaded, RateLimited, Unauthenticated


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert Tenants({}).of(None) == "default"


def test_a_key_names_its_tenant() -> None:
    tenants = Tenants(parse_keys("k1:red, k:2:blue"))
    assert tenants.of("Bearer k1") == "red"
    assert tenants.of("bearer k:2") == "blue"
    for bad in (None, "", "k1", "Basic k1", "Bearer", "Bearer k3"):
        with pytest.raises(Unauthenticated):
            tenants.of(bad)


@pytest.mark.parametrize("text", ["secret", ":red", "k:", "secret:red,secret:blue"])
def test_keys_that_do_not_parse_are_refused_without_showing_them(text: str) -> None:
    with pytest.raises((ValueError, InvalidRequest)) as refused:
        parse_keys(text)
    assert "secret" not in str(refused.value)


def test_places_are_counted_by_tenant_and_in_all() -> None:
    admission = Admission(max_sequences=4, max_tenant_sequences=3)
    with admission.admit("red", 3):
        with pytest.raises(RateLimited), admission.admit("red", 1):
            pass
        with pytest.raises(Overloaded), admission.admit("blue", 2):
            pass
        with admission.admit("blue", 1):
            assert admission.num_running == 4
    assert admission.num_running == 0
