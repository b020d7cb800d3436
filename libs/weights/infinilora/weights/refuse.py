"""How this room says no: one sentence with file, what, found, wanted. Knows nothing of how things are found."""

from infinilora.protocol.errors import AdapterInvalid


def invalid(file: str, what: str, *, found: object, wanted: object) -> AdapterInvalid:
    """The error for an adapter that cannot be served exactly; the caller raises it."""
    return AdapterInvalid(f"{file}: {what}: found {found}; wanted {wanted}", param="source")
