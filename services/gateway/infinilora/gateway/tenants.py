"""Who is calling: an API key to a tenant. Without keys everybody is the default tenant."""

from collections.abc import Mapping

from infinilora.protocol.ids import DEFAULT_TENANT
from infinilora.runtime import bearers


def parse_keys(text: str) -> dict[str, str]:
    """Read `key:tenant,key:tenant`. Raises ValueError; the message shows no key."""
    return bearers.parse_keys(text, "tenant")


class Tenants:
    """Known keys."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._bearers = bearers.Bearers(keys)

    @property
    def is_open(self) -> bool:
        """Nobody shows a key."""
        return not len(self._bearers)

    def of(self, authorization: str | None) -> str:
        """The tenant of an `Authorization` header. Raises Unauthenticated."""
        return DEFAULT_TENANT if self.is_open else self._bearers.of(authorization)
