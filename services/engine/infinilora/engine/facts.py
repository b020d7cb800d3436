"""Answers questions about a checkpoint's weights that become part of packed adapters (weights/factsfile.py).

    python -m infinilora.engine.facts DIR --request FILE --out FILE     as an engine of this directory would answer

Reads the checkpoint, not what an engine has made of it: an engine that keeps bf16 of an fp32 file gives fp32 rows. One
question at a time, a few megabytes of a matrix at a time, and the same bytes on every machine (`rounded`).
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from infinilora.engine.model.checkpoint import Checkpoint, TensorSource
from infinilora.engine.model.names import EMBED, LM_HEAD, site_geometry, tensor_shapes
from infinilora.engine.model.spec import ModelSpec, read_spec
from infinilora.engine.prepare import fingerprint
from infinilora.protocol.adapter import Site
from infinilora.protocol.errors import InfiniLoraError, InvalidRequest, Unavailable
from infinilora.protocol.ids import Fingerprint
from infinilora.weights.factsfile import (
    HASH_BYTES,
    MAX_ROWS,
    AnswerHead,
    Question,
    answer_bytes,
    read_request,
    row_hashes,
)

if TYPE_CHECKING:
    from infinilora.weights.tensorfile import Array

MAX_RANK = 1 << 14
PIECE_BYTES = 16 << 20
"""Of a matrix in fp64, at a time."""
_ROW_PIECE = 1024
_CLOSE = 2.0**-40
"""How near to the middle of two fp32 numbers a norm is computed again: far beyond the error of any fp64 product."""


class Facts:
    """Answers from one checkpoint. Holds nothing between questions. Blocking, on one thread."""

    def __init__(self, spec: ModelSpec, source: TensorSource, base: Fingerprint) -> None:
        self._source = source
        self._spec = spec
        self._head = AnswerHead(base=base, is_tied=spec.tied_embeddings)
        dense = [site for site in site_geometry(spec) if not site.num_experts]
        self._matrices = {
            part.module: (part.out_dim, site.in_dim)
            for site in dense
            for part in site.parts
            if site.site is not Site.EMBED
        }

    def read(self, path: Path) -> dict[str, Question]:
        """The questions of a request file, each checked. Raises InvalidRequest, or Unavailable for another base's."""
        try:
            head, questions = read_request(path)
        except InfiniLoraError as error:
            raise InvalidRequest(f"facts request: {error.message}") from error
        if head.base != self._head.base:
            raise Unavailable(f"this engine serves {self._head.base}; the question is about {head.base}")
        for question in questions.values():
            self._check(question)
        return questions

    def answer(self, question: Question) -> Mapping[str, "Array"]:
        """Tensors by role."""
        ask, tensors = question.ask, question.tensors
        if ask.kind == "norms":
            norms = row_norms(self._weight(ask.module), tensors["a"], tensors["b"], ask.scale)
            return {"norms": norms, "bias": self._bias(ask.module)}
        table = self._weight(ask.module)
        indices = tensors["indices"] if ask.kind == "rows" else _changed(table, tensors["hashes"])
        num_rows = len(indices) if ask.kind == "rows" or len(indices) <= ask.limit else 0
        rows = table[torch.from_numpy(indices[:num_rows].copy())].float().numpy()
        return {"rows": rows} if ask.kind == "rows" else {"indices": indices, "rows": rows}

    def file(self, questions: Mapping[str, Question], answers: Mapping[str, Mapping[str, "Array"]]) -> bytes:
        """The answer file."""
        asks = {name: question.ask for name, question in questions.items()}
        return answer_bytes(msgspec.structs.replace(self._head, asks=asks), answers)

    def _weight(self, module: str) -> Tensor:
        name = f"{module}.weight"
        return self._source.get(EMBED if name == LM_HEAD and self._spec.tied_embeddings else name)

    def _bias(self, module: str) -> "Array":
        """F32 [out]; [0] where the module has none."""
        name = f"{module}.bias"
        bias = self._source.get(name) if name in tensor_shapes(self._spec) else torch.empty(0)
        values: Array = bias.float().numpy()
        return values

    def _check(self, question: Question) -> None:
        ask, tensors = question.ask, question.tensors
        if ask.kind == "norms":
            out_dim, in_dim = self._matrices.get(ask.module, (-1, -1))
            a, b = tensors["a"], tensors["b"]
            is_good = a.ndim == 2 and a.dtype.itemsize <= 4 and b.dtype.itemsize <= 4 and len(a) <= MAX_RANK
            is_good = is_good and (a.shape[1], b.shape) == (in_dim, (out_dim, len(a))) and math.isfinite(ask.scale)
        else:
            is_good = f"{ask.module}.weight" in (EMBED, LM_HEAD) and self._is_of_table(question)
        if not is_good:
            shapes = {role: list(values.shape) for role, values in tensors.items()}
            raise InvalidRequest(
                f"facts request: {ask.kind} of {ask.module}: found {shapes}; wanted those of its matrix"
            )

    def _is_of_table(self, question: Question) -> bool:
        vocab = self._spec.vocab_size
        if question.ask.kind == "changed":
            hashes = question.tensors["hashes"]
            return hashes.shape == (vocab, HASH_BYTES) and hashes.dtype == np.uint8 and question.ask.limit <= MAX_ROWS
        indices = question.tensors["indices"]
        is_list = indices.ndim == 1 and indices.dtype == np.int64 and len(indices) <= MAX_ROWS
        return is_list and bool(((indices >= 0) & (indices < vocab)).all())


def _changed(table: Tensor, hashes: "Array") -> "Array":
    """I64 [m]: the rows of the table [n, width] whose values have another hash."""
    found = []
    for start in range(0, len(table), _ROW_PIECE):
        own = row_hashes(table[start : start + _ROW_PIECE].float().numpy())
        found.append(start + np.flatnonzero((own != hashes[start : start + _ROW_PIECE]).any(axis=1)))
    return np.concatenate(found).astype(np.int64)


# Norms --------------------------------------------------------------------------------------------


def row_norms(weight: Tensor, a: "Array", b: "Array", scale: float) -> "Array":
    """|W[i] + scale · b[i]·a| of each row i, fp32 [out], rounded from fp64; W [out, in], a [r, in], b [out, r]."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64) * scale
    return np.concatenate(
        [
            _piece_norms(weight[rows].double().numpy(), wide_a, wide_b[rows])
            for rows in _row_pieces(weight.shape[0], 8 * weight.shape[1])
        ]
    )


def _row_pieces(num_rows: int, row_bytes: int) -> Iterator[slice]:
    size = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _piece_norms(w: "Array", a: "Array", b: "Array") -> "Array":
    """fp32 norms of rows of w + b·a, all fp64."""
    sums = torch.addmm(*map(torch.from_numpy, (w, b, a)))
    norms: Array = torch.linalg.vector_norm(sums, dim=1).numpy()
    return rounded(norms, lambda row: _norm_in_order(w[row], a, b[row]))


def rounded(norms: "Array", again: Callable[[int], float]) -> "Array":
    """fp64 norms as fp32, the same on every machine; `again` computes a row's in an order that is the same everywhere.

    Libraries sum in their own order, so two machines may differ in the last bits of fp64. Where these could decide
    how a norm rounds, both look at `again` instead.
    """
    nearest: Array = norms.astype(np.float32)
    other = np.nextafter(nearest, np.where(norms > nearest, np.float32(np.inf), np.float32(0.0)))
    middle = (nearest.astype(np.float64) + other.astype(np.float64)) / 2
    for row in np.flatnonzero(np.abs(norms - middle) <= _CLOSE * norms):
        nearest[row] = np.float32(again(int(row)))
    return nearest


def _norm_in_order(w: "Array", a: "Array", b: "Array") -> float:
    """|w + b·a| of one row, by additions and products in a fixed order, each rounded by itself."""
    total = w.copy()
    for factor, direction in zip(b, a, strict=True):
        total += factor * direction
    squares = np.zeros(1 << (len(total) - 1).bit_length())
    squares[: len(total)] = total * total
    while len(squares) > 1:
        half = len(squares) // 2
        squares = squares[:half] + squares[half:]
    return float(np.sqrt(squares[0]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m infinilora.engine.facts", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--request", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        spec = read_spec(args.directory)
        source = Checkpoint(args.directory, spec)
        facts = Facts(spec, source, fingerprint(spec, source))
        questions = facts.read(args.request)
        answers = {name: facts.answer(question) for name, question in questions.items()}
    except InfiniLoraError as error:
        sys.stderr.write(f"{error.code}: {error}\n")
        return 1
    args.out.write_bytes(facts.file(questions, answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
