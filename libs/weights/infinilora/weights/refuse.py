"""How this room says no: one sentence with file, what, found, wanted. Knows nothing of how things are found."""

from collections.abc import Sequence

from infinilora.protocol.errors import AdapterInvalid

_MOST_LISTED = 16


def invalid(file: str, what: str, *, found: object, wanted: object) -> AdapterInvalid:
    """The error for an adapter that cannot be served exactly; the caller raises it."""
    return AdapterInvalid(f"{file}: {what}: found {found}; wanted {wanted}", param="source")


def listed(names: Sequence[object]) -> str:
    """The names, or the first of them and how many there are."""
    text = ", ".join(str(name) for name in names[:_MOST_LISTED])
    return text if len(names) <= _MOST_LISTED else f"{text}, ... ({len(names)} in all)"
