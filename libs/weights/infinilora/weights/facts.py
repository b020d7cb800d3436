"""What planning an adapter needs to know of the base's weights, which this process does not have.

    facts = Facts(card, answers)
    norms = facts.norms(module, a, b, scale)      # None: asked, and not answered yet
    ...                                           # ask for all that is needed, then
    facts.check_answered()                        # raises FactsWanted, with every question

Between calls: the questions that were asked, and those without an answer. Who carries them is not known here: the
worker writes them to a file and is run again with an answer (`ingest`). An answer is held against its question, and
becomes part of what is packed; the same question about the same base has the same answer, to the bit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import AdapterInvalid, Internal, Unavailable
from infinilora.weights.factsfile import AnswerHead, Ask, Question, read_answer, row_hashes
from infinilora.weights.tensorfile import Array, TensorFile, all_finite


class FactsWanted(Exception):
    """Planning cannot go on without answers to `questions`, by name."""

    def __init__(self, questions: dict[str, Question]) -> None:
        super().__init__(f"{len(questions)} questions about the base's weights")
        self.questions = questions


class Changed(NamedTuple):
    """Rows of a table that are not the base's: `indices` I64 [m], ascending, and the base's `rows` F32 [m, width].

    Where m is more than was asked for there are no rows: [0, width].
    """

    indices: Array
    rows: Array


class Norms(NamedTuple):
    """Of a module of the base: `lengths` F32 [out] of the rows of its W with a delta, and its `bias` F32 [out]."""

    lengths: Array
    bias: Array | None


class Facts:
    """Answers about one base; without `answers` every question is only noted."""

    def __init__(self, card: BaseCard, answers: Path | None = None) -> None:
        """Raises Unavailable for answers about another base."""
        self._card = card
        self._file: TensorFile | None = None
        self._is_tied = False
        self._unanswered: dict[str, Question] = {}
        if answers is not None:
            head, self._file = _read(answers)
            self._is_tied = head.is_tied
            if head.base != card.fingerprint:
                raise Unavailable("the engine that was asked serves another base model by now", retry_after_s=1.0)

    @property
    def is_answered(self) -> bool:
        """Whether there are answers to anything."""
        return self._file is not None

    @property
    def is_tied(self) -> bool:
        """Whether the base's head is its embedding; known once anything was answered."""
        return self._is_tied

    def rows(self, module: str, indices: Array) -> Array | None:
        """The base's rows F32 [n, width] of the table of `module` (embedding or head) at `indices` [n]."""
        wanted = {"rows": (len(indices), self._card.hidden_dim)}
        answer = self._ask(Ask(kind="rows", module=module), {"indices": indices.astype(np.int64)}, wanted)
        return None if answer is None else answer["rows"]

    def changed(self, module: str, table: Array, *, limit: int) -> Changed | None:
        """The rows of `table` [vocabulary, width] whose values are not the base's, and the base's, up to `limit`."""
        ask = Ask(kind="changed", module=module, limit=limit)
        answer = self._ask(ask, {"hashes": row_hashes(table)}, {"indices": None, "rows": None})
        if answer is None:
            return None
        indices, rows = answer["indices"], answer["rows"]
        num_rows = len(indices) if len(indices) <= limit else 0
        if rows.shape != (num_rows, self._card.hidden_dim) or not _ascend(indices, len(table)):
            raise Internal(f"facts: {module}: found {len(indices)} changed rows and {list(rows.shape)} values of them")
        return Changed(indices, rows)

    def norms(self, module: str, a: Array, b: Array, scale: float) -> Norms | None:
        """|W[i] + scale · b[i]·a| of each row i of W, the matrix of `module`, and its bias; a [r, in], b [out, r]."""
        ask = Ask(kind="norms", module=module, scale=scale)
        answer = self._ask(ask, {"a": a, "b": b}, {"norms": (len(b),), "bias": None})
        if answer is None:
            return None
        lengths, bias = answer["norms"], answer["bias"]
        if bias.shape not in (lengths.shape, (0,)):
            raise Internal(f"facts: bias of {module}: found {list(bias.shape)}; wanted {list(lengths.shape)}, or none")
        return Norms(lengths, bias if len(bias) else None)

    def check_answered(self) -> None:
        """Raises FactsWanted where something is not answered."""
        if self._unanswered:
            raise FactsWanted(self._unanswered)

    def _ask(
        self, ask: Ask, tensors: dict[str, Array], wanted: Mapping[str, tuple[int, ...] | None]
    ) -> dict[str, Array] | None:
        """The answer's tensors by role, of the wanted shapes (None: the caller looks); None: not answered yet."""
        question = Question(ask, tensors)
        name = question.name
        if self._file is None or f"{name}.{min(wanted)}" not in self._file.tensors:
            self._unanswered[name] = question
            return None
        answer = {role: self._file.read(f"{name}.{role}") for role in wanted}
        for role, values in answer.items():
            if wanted[role] not in (None, values.shape):
                raise Internal(f"facts: {role} of {ask.module}: found {list(values.shape)}; wanted {wanted[role]}")
            if values.dtype.kind == "f" and not all_finite(values):
                raise Unavailable(f"the base's own weights of {ask.module} are not finite", retry_after_s=60.0)
        return answer


def _read(answers: Path) -> tuple[AnswerHead, TensorFile]:
    try:
        return read_answer(answers)
    except AdapterInvalid as error:  # of our own making, and not the adapter's fault
        raise Internal(f"facts: {error.message}") from error


def _ascend(indices: Array, end: int) -> bool:
    return bool((np.diff(indices) > 0).all()) and (not len(indices) or (indices[0] >= 0 and indices[-1] < end))
