"""API keys: who shows which. Knows no route, and what a name may do is for the service to say."""

import hmac
from collections.abc import Mapping

from infinilora.protocol.errors import Unauthenticated
from infinilora.protocol.ids import check_name

BEARER = "bearer "


def parse_keys(text: str, what: str) -> dict[str, str]:
    """Read `key:name,key:name`; `what` the names are of. Raises ValueError; the message shows no key."""
    names: dict[str, str] = {}
    for number, entry in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
        key, colon, name = entry.rpartition(":")
        if not colon or not key:
            raise ValueError(f"entry {number} is not 'key:{what}'")
        if key in names:
            raise ValueError(f"entry {number} has the key of an earlier one; wanted one {what} a key")
        names[key] = check_name(name, what)
    return names


class Bearers:
    """Known keys and whose they are. Compares in constant time."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = {key.encode(): name for key, name in names.items()}

    def __len__(self) -> int:
        return len(self._names)

    def of(self, authorization: str | None) -> str:
        """Whose key an `Authorization` header shows. Raises Unauthenticated."""
        given = authorization or ""
        if not given.lower().startswith(BEARER):
            raise Unauthenticated("no API key; send 'Authorization: Bearer KEY'")
        presented = given[len(BEARER) :].strip().encode()
        found = [name for key, name in self._names.items() if hmac.compare_digest(key, presented)]
        if not found:
            raise Unauthenticated("the API key is not known")
        return found[0]
