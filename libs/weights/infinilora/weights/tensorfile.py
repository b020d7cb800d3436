"""Read a safetensors file by hand: every offset is checked before a byte is trusted, tensors stay on disk.

Why not the library: bf16 has no numpy dtype there, and a refusal must name the tensor and the byte counts.
Knows nothing of LoRA.
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from infinilora.weights.refuse import invalid

Array = NDArray[Any]

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
}
"""Of weights."""
MAX_HEADER_BYTES = 100 << 20
MAX_TENSORS = 200_000
MAX_NAME_CHARS = 512
MAX_DIMS = 8
MAX_VALUES = 1 << 48
"""Of a shape, a size of 0 counted as 1: what numpy can say, and more than any file holds."""
LENGTH_BYTES = 8
_HASH_CHUNK_BYTES = 1 << 20
_FIRST_BYTES = 64


class TensorInfo(msgspec.Struct, frozen=True):
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A checked header over a mapped file: every entry is of a dtype we read and lies inside the file."""

    path: Path
    tensors: dict[str, TensorInfo]
    data: Array
    """The data section, uint8, mapped read-only."""
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=lambda: NUMPY_DTYPES)
    """Those that its entries may have."""

    @property
    def name(self) -> str:
        return self.path.name

    def read(self, tensor: str) -> Array:
        """The tensor as a read-only view of the mapped file, in its own dtype."""
        info = self.tensors[tensor]
        begin, end = info.data_offsets
        return self.data[begin:end].view(self.dtypes[info.dtype]).reshape(info.shape)

    def sha256(self) -> str:
        return sha256_of_file(self.path)


def all_finite(values: Array) -> bool:
    """Whether no value of an array of our dtypes is NaN or infinite. By bits: numpy asks bf16 one by one."""
    bits = values.view(f"<u{values.itemsize}")
    infinity = np.array(np.inf, values.dtype).view(bits.dtype)
    sign = bits.dtype.type(1 << (8 * values.itemsize - 1))
    return bool((bits & ~sign).max(initial=0) < infinity)


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def open_tensors(path: Path, dtypes: Mapping[str, np.dtype[Any]] = NUMPY_DTYPES) -> TensorFile:
    """Map a safetensors file after checking its header against its size. Raises AdapterInvalid."""
    tensors, data_start = check_file(path, path.stat().st_size, dtypes)
    return TensorFile(path=path, tensors=tensors, data=_map(path)[data_start:], dtypes=dtypes)


def check_file(
    path: Path, size: int, dtypes: Mapping[str, np.dtype[Any]] = NUMPY_DTYPES
) -> tuple[dict[str, TensorInfo], int]:
    """The entries of a file and where its data starts. Raises AdapterInvalid.

    `size`: of the whole file. Its header must be there; the rest may be on its way still.
    """
    with path.open("rb") as file:
        first = file.read(_FIRST_BYTES)
        _refuse_foreign(path.name, first)
        if size < LENGTH_BYTES or len(first) < LENGTH_BYTES:
            raise invalid(path.name, "header length", found=f"{size} bytes of file", wanted="at least 8")
        header_bytes = int.from_bytes(first[:LENGTH_BYTES], "little")
        if header_bytes > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise invalid(
                path.name,
                "header length",
                found=f"{header_bytes} in a file of {size} bytes",
                wanted=f"at most {min(size - LENGTH_BYTES, MAX_HEADER_BYTES)} (truncated or not safetensors)",
            )
        file.seek(LENGTH_BYTES)
        header = file.read(header_bytes)
    data_start = LENGTH_BYTES + header_bytes
    return parse_header(path.name, header, size - data_start, dtypes), data_start


def header_end(first: bytes, size: int) -> int:
    """How much of a file of this size `check_file` needs, told from its first eight bytes."""
    length = int.from_bytes(first, "little")
    return min(
        size, max(_FIRST_BYTES, LENGTH_BYTES + length if length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES) else 0)
    )


def _refuse_foreign(file: str, first: bytes) -> None:
    """What downloads leave in the place of a weight file that was not there."""
    text = first.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        kind = "a Git LFS pointer, which only names the weights"
    elif text.startswith((b"<!doctype", b"<html", b"<?xml")):
        kind = "a web page or an error message"
    else:
        return
    raise invalid(file, "weights unreadable", found=kind, wanted="a safetensors file")


def parse_header(
    file: str, header: bytes, data_bytes: int, dtypes: Mapping[str, np.dtype[Any]] = NUMPY_DTYPES
) -> dict[str, TensorInfo]:
    """The entries of a safetensors header, checked against the size of the data that follows it.

    Pure: `file` is only a name for refusals. Raises AdapterInvalid.
    """
    tensors = _entries(file, header)
    _check_offsets(file, tensors, data_bytes, dtypes)
    return tensors


def _map(path: Path) -> Array:
    """The whole file, read-only. A plain array over the map: slices of np.memmap cost ten times as much."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _entries(file: str, header: bytes) -> dict[str, TensorInfo]:
    try:
        # A text first: what a decoder skips it does not look into.
        entries = msgspec.json.decode(header.decode(), type=dict[str, msgspec.Raw])
        if metadata := entries.pop("__metadata__", None):
            msgspec.json.decode(metadata, type=dict[str, str] | None)
        _check_names(file, entries)
        return {name: msgspec.json.decode(raw, type=TensorInfo) for name, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(file, "header", found=str(error), wanted="the JSON table of a safetensors file") from error
    except RecursionError:
        raise invalid(
            file, "header", found="nesting too deep to read", wanted="the JSON table of a safetensors file"
        ) from None


def _check_names(file: str, names: Collection[str]) -> None:
    if len(names) > MAX_TENSORS:
        raise invalid(file, "tensors", found=len(names), wanted=f"at most {MAX_TENSORS}")
    for name in names:
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise invalid(
                file,
                f"tensor {name!r:.200}",
                found=f"a name of {len(name)} characters",
                wanted=f"at most {MAX_NAME_CHARS}, all printable",
            )


def _check_offsets(
    file: str, tensors: dict[str, TensorInfo], data_bytes: int, dtypes: Mapping[str, np.dtype[Any]]
) -> None:
    end_of_last = 0
    for name, info in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        dtype = dtypes.get(info.dtype)
        if dtype is None:
            raise invalid(file, f"tensor {name} dtype", found=info.dtype, wanted=" or ".join(dtypes))
        _check_shape(file, name, info.shape)
        begin, end = info.data_offsets
        num_bytes = math.prod(info.shape) * dtype.itemsize
        if begin != end_of_last or end - begin != num_bytes:
            raise invalid(
                file,
                f"tensor {name} bytes",
                found=f"[{begin}, {end})",
                wanted=f"{num_bytes} bytes from {end_of_last} on (no holes, no overlaps)",
            )
        if end > data_bytes:
            raise invalid(
                file,
                f"tensor {name}",
                found=f"a file that ends after {data_bytes} bytes of data",
                wanted=f"data up to byte {end} (truncated file)",
            )
        end_of_last = end
    if end_of_last != data_bytes:
        raise invalid(file, "data", found=f"{data_bytes} bytes", wanted=f"{end_of_last}, the end of the last tensor")


def _check_shape(file: str, name: str, shape: tuple[int, ...]) -> None:
    """Before it is multiplied out: the product of a million sizes takes minutes."""
    is_good = len(shape) <= MAX_DIMS and all(dim >= 0 for dim in shape)
    if not is_good or math.prod(max(dim, 1) for dim in shape) > MAX_VALUES:
        raise invalid(
            file,
            f"tensor {name} shape",
            found=f"{len(shape)} sizes, {list(shape[:MAX_DIMS])!s:.200}",
            wanted=f"at most {MAX_DIMS}, none of them negative, of at most {MAX_VALUES} values",
        )
