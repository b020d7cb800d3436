"""The files that carry questions about a base's weights to one of its engines, and the answers back.

Both are safetensors files. What is asked stands as JSON in the metadata, whatever has a size is a tensor:

    rows      indices I64 [n]                      -> rows F32 [n, width]: of the embedding's or the head's table
    changed   hashes U8 [vocabulary, 16], limit    -> indices I64 [m]: rows of the table with other hashes, ascending,
                                                      rows F32 [m, width], or [0, width] where m is beyond the limit
    norms     a [rank, in], b [out, rank], scale   -> norms F32 [out]: of the rows of W + scale * b a,
                                                      bias F32 [out] of the base's module, or [0] where it has none

A question's name is a hash of all of it, and its tensors and those of its answer are named `NAME.ROLE`. So an answer
fits its question and no other, and the same question is written, and answered, in the same bytes.

Knows bytes, limits and names. Who asks is `facts`; who answers is an engine.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from infinilora.protocol.ids import Fingerprint
from infinilora.weights.refuse import invalid
from infinilora.weights.tensorfile import LENGTH_BYTES, NUMPY_DTYPES, Array, TensorFile, open_tensors

VERSION = 1
MAX_QUESTIONS = 10_000
MAX_ROWS = 1 << 16
"""Of a table, in one question or answer."""
HASH_BYTES = 16
"""Of a row: two rows of one hash are one row."""
DTYPES = {**NUMPY_DTYPES, "I64": np.dtype("<i8"), "U8": np.dtype(np.uint8)}

_METADATA_KEY = "infinilora_facts"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGN = 8
_HASHED_ROWS = 1024

Kind = Literal["rows", "changed", "norms"]
ROLES: dict[Kind, tuple[str, ...]] = {"rows": ("indices",), "changed": ("hashes",), "norms": ("a", "b")}
"""The tensors of each kind of question."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A question, less its tensors. `module` is the base card's name for it."""

    kind: Kind
    module: str
    scale: float = 1.0
    limit: int = 0


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a request: questions by name, about the base of this fingerprint."""

    version: int = VERSION
    base: Fingerprint
    asks: dict[str, Ask]


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of an answer: to these questions, so that it can be read without them."""

    version: int = VERSION
    base: Fingerprint
    asks: dict[str, Ask] = {}
    is_tied: bool
    """Whether the base's head is its embedding."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its tensors, by role."""

    ask: Ask
    tensors: Mapping[str, Array]

    @property
    def name(self) -> str:
        state = hashlib.sha256(msgspec.json.encode(self.ask))
        for role, values in sorted(self.tensors.items()):
            state.update(f"{role} {_NAMES[values.dtype]} {list(values.shape)}".encode())
            state.update(np.ascontiguousarray(values).view(np.uint8).data)
        return state.hexdigest()[:32]


def row_hashes(rows: Array) -> Array:
    """U8 [n, 16] of rows [n, width] in any of our dtypes: of their values, whatever they are kept in."""
    hashes = bytearray()
    for start in range(0, len(rows), _HASHED_ROWS):
        values = rows[start : start + _HASHED_ROWS].astype(np.float32) + np.float32(0.0)  # -0 is 0
        for row in values:
            hashes += hashlib.sha256(row.data).digest()[:HASH_BYTES]
    return np.frombuffer(bytes(hashes), np.uint8).reshape(len(rows), HASH_BYTES)


def write_request(path: Path, base: Fingerprint, questions: Mapping[str, Question]) -> None:
    """Write questions by name. Blocking."""
    head = RequestHead(base=base, asks={name: question.ask for name, question in sorted(questions.items())})
    tensors = {
        f"{name}.{role}": values
        for name, question in sorted(questions.items())
        for role, values in sorted(question.tensors.items())
    }
    with path.open("wb") as file:
        for piece in _pieces(head, tensors):
            file.write(piece)


def read_request(path: Path) -> tuple[RequestHead, dict[str, Question]]:
    """Questions by name, their tensors still on disk. Raises AdapterInvalid for what is not a request."""
    head, file = _open(path, RequestHead)
    if not 0 < len(head.asks) <= MAX_QUESTIONS:
        raise invalid(path.name, "questions", found=len(head.asks), wanted=f"1 to {MAX_QUESTIONS}")
    wanted = {f"{name}.{role}" for name, ask in head.asks.items() for role in ROLES[ask.kind]}
    if wanted != file.tensors.keys():
        raise invalid(path.name, "tensors", found=sorted(file.tensors)[:8], wanted="those of the questions")
    read = {
        name: Question(ask, {role: file.read(f"{name}.{role}") for role in ROLES[ask.kind]})
        for name, ask in head.asks.items()
    }
    return head, read


def answer_bytes(head: AnswerHead, answers: Mapping[str, Mapping[str, Array]]) -> bytes:
    """An answer file: tensors by the question's name and by role."""
    tensors = {f"{name}.{role}": values for name, roles in answers.items() for role, values in roles.items()}
    return b"".join(_pieces(head, tensors))


def read_answer(path: Path) -> tuple[AnswerHead, TensorFile]:
    """The answer and its tensors, still on disk. Raises AdapterInvalid for what is not one."""
    return _open(path, AnswerHead)


# The bytes ----------------------------------------------------------------------------------------


def _pieces(head: msgspec.Struct, tensors: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """A safetensors file piece by piece: the header first, then each tensor as it lies in memory."""
    table: dict[str, Any] = {"__metadata__": {_METADATA_KEY: msgspec.json.encode(head).decode()}}
    at = 0
    for name, values in tensors.items():
        span = (at, at + values.nbytes)
        table[name] = {"dtype": _NAMES[values.dtype], "shape": values.shape, "data_offsets": span}
        at = span[1]
    header = msgspec.json.encode(table)
    header += b" " * (-(LENGTH_BYTES + len(header)) % _ALIGN)
    yield len(header).to_bytes(LENGTH_BYTES, "little") + header
    for values in tensors.values():
        yield np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


H = TypeVar("H", RequestHead, AnswerHead)


class _Table(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__")


def _open(path: Path, kind: type[H]) -> tuple[H, TensorFile]:
    file = open_tensors(path, DTYPES)
    with path.open("rb") as opened:
        header = opened.read(int.from_bytes(opened.read(LENGTH_BYTES), "little"))
    try:
        table = msgspec.json.decode(header, type=_Table)
        head = msgspec.json.decode(table.metadata[_METADATA_KEY], type=kind)
    except (msgspec.DecodeError, KeyError) as error:
        raise invalid(path.name, "metadata", found=str(error), wanted=f"{_METADATA_KEY}, JSON") from error
    if head.version != VERSION:
        raise invalid(path.name, "version", found=head.version, wanted=VERSION)
    return head, file
