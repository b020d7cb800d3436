"""SHA-256 of several stretches of memory in one call: two at a time where the processor can, else by hashlib."""

import ctypes
import hashlib
from collections.abc import Sequence

import numpy as np

from infinilora.kernels import native
from infinilora.kernels.abi import Stretch

DIGEST_BYTES = 32


def sha256_each(stretches: Sequence[memoryview | bytes]) -> list[bytes]:
    """The digest of each. Without the GIL while it hashes; no stretch may be written meanwhile."""
    library = native.load()
    if library is None or not library.il_has_sha256():
        return [hashlib.sha256(stretch).digest() for stretch in stretches]
    arrays = [np.frombuffer(stretch, np.uint8) for stretch in stretches]
    records = (Stretch * len(arrays))(*[Stretch(array.ctypes.data, len(array)) for array in arrays])
    digests = ctypes.create_string_buffer(DIGEST_BYTES * len(arrays))
    library.il_sha256(records, len(arrays), digests)
    return [digests.raw[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
