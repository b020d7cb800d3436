"""DoRA's factors found a second time: what is multiplied by what, for the self-test alone.

Shares the answers of the base's engine with the plan, since there is no second base to ask, and nothing else: an answer
is looked up by the very question, the pair and the scale as *this* road reads them. Where the plan asked about other
numbers there is no answer to it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from infinilora.protocol.errors import Internal
from infinilora.weights.factsfile import Ask, Question, read_answer
from infinilora.weights.tensorfile import Array


class Scaling(NamedTuple):
    """Row i of the output is multiplied by factors[i], but for the base's own bias[i]; float64 [out]."""

    factors: Array
    bias: Array


class Lengths:
    """The lengths of the base's rows, as its engine told them of each pair."""

    def __init__(self, answers: Path | None) -> None:
        self._file = None if answers is None else read_answer(answers)[1]

    def scaling(
        self, modules: Sequence[tuple[str, slice]], magnitudes: Array, pair: tuple[Array, Array], scale: float
    ) -> Scaling:
        """Of a pair a [r, in], b [out, r] whose rows of b are those of the base's modules, one after the other."""
        a, b = pair
        lengths, biases = np.zeros(len(b)), np.zeros(len(b))
        for module, rows in modules:
            ask = Ask(kind="norms", module=module, scale=float(np.float32(scale)))
            lengths[rows], biases[rows] = self._answer(Question(ask, {"a": a, "b": b[rows]}))
        return Scaling(magnitudes / lengths, biases)

    def _answer(self, question: Question) -> tuple[Array, Array | float]:
        name = question.name
        if self._file is None or f"{name}.norms" not in self._file.tensors:
            raise Internal(
                f"self-test: found no answer about the rows of {question.ask.module} with the files' own pair and "
                f"scale {question.ask.scale:.6g}; wanted the one that the plan had"
            )
        bias = self._file.read(f"{name}.bias")
        return self._file.read(f"{name}.norms").astype(np.float64), bias.astype(np.float64) if len(bias) else 0.0
