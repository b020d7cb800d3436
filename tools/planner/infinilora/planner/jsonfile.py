"""A person's JSON file as a struct, or words that say what is wrong with it."""

from pathlib import Path
from typing import TypeVar

import msgspec

from infinilora.protocol.errors import InvalidRequest

T = TypeVar("T")


def read_json(path: Path, kind: type[T], *, param: str, wanted: str) -> T:
    """InvalidRequest names the file, the place in it, and the option that it came by."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise InvalidRequest(f"found {path}, {error.strerror}; wanted a file to read", param=param) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{path}: {error}; wanted {wanted}", param=param) from None
