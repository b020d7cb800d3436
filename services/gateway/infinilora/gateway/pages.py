"""Long lists, a page at a time, as clients of OpenAI's API read them: `limit`, `after`, `has_more`. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.ids import check_name

MAX_LIMIT = 1000
DEFAULT_LIMIT = 100


class Page(NamedTuple):
    """What was asked for: at most `limit` entries, those after the entry of this id."""

    limit: int
    after: str

    def answer(self, entries: Sequence[dict[str, Any]], *, first: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The list object. `entries` holds one more than the page takes if there is more."""
        shown = [*first, *entries[: self.limit]]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(entries) > self.limit,
        }


def read_page(query: Mapping[str, str], *, default: int = DEFAULT_LIMIT) -> Page:
    """Read `limit` and `after` of a query. Raises InvalidRequest."""
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_LIMIT)) and 1 <= int(limit) <= MAX_LIMIT):
        raise InvalidRequest(f"limit is {limit[:20]!r}; wanted 1 to {MAX_LIMIT}", param="limit")
    after = query.get("after", "")
    return Page(int(limit), check_name(after, "after") if after else "")
