"""Who is calling: an API key to a tenant. Without keys everybody is the default tenant."""

import hmac
from collections.abc import Mapping

from infinilora.protocol.errors import Unauthenticated
from infinilora.protocol.ids import DEFAULT_TENANT, check_name

BEARER = "bearer "


def parse_keys(text: str) -> dict[str, str]:
    """Read `key:tenant,key:tenant`. Raises ValueError; the message shows no key."""
    tenants: dict[str, str] = {}
    for number, entry in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
        key, colon, tenant = entry.rpartition(":")
        if not colon or not key:
            raise ValueError(f"entry {number} is not 'key:tenant'")
        tenants[key] = check_name(tenant, "tenant")
    return tenants


class Tenants:
    """Known keys. Compares in constant time."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = {key.encode(): tenant for key, tenant in keys.items()}

    @property
    def is_open(self) -> bool:
        """Nobody shows a key."""
        return not self._keys

    def of(self, authorization: str | None) -> str:
        """The tenant of an `Authorization` header. Raises Unauthenticated."""
        if not self._keys:
            return DEFAULT_TENANT
        given = authorization or ""
        if not given.lower().startswith(BEARER):
            raise Unauthenticated("no API key; send 'Authorization: Bearer KEY'")
        presented = given[len(BEARER) :].strip().encode()
        found = [tenant for key, tenant in self._keys.items() if hmac.compare_digest(key, presented)]
        if not found:
            raise Unauthenticated("the API key is not known")
        return found[0]
