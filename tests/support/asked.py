"""Ingest with a base model beside it: what a gateway does with two runs of the worker and an engine, in one call."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from infinilora.engine.facts import Facts
from infinilora.engine.model.checkpoint import Checkpoint
from infinilora.engine.model.spec import read_spec
from infinilora.engine.prepare import base_card
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.ingest import MAX_RANK, IngestReport
from infinilora.weights.facts import FactsWanted
from infinilora.weights.factsfile import write_request
from infinilora.weights.ingest import run

T = TypeVar("T")


class AskedBase:
    """A checkpoint that is asked as an engine of it would be; files lie in `root`."""

    def __init__(self, directory: Path, root: Path) -> None:
        spec = read_spec(directory)
        source = Checkpoint(directory, spec)
        self.directory, self.root = directory, root
        self.card: BaseCard = base_card(spec, source, directory=directory, name=directory.name, max_len=64)
        self._facts = Facts(spec, source, self.card.fingerprint)
        self.num_asked = 0

    def ask(self, wanted: FactsWanted) -> Path:
        """The answer file to all that is wanted."""
        self.num_asked += 1
        request, answer = self.root / "facts.request", self.root / f"facts.answer-{self.num_asked}"
        write_request(request, self.card.fingerprint, wanted.questions)
        self.answer(request, answer)
        return answer

    def answer(self, request: Path, answer: Path) -> None:
        questions = self._facts.read(request)
        answers = {name: self._facts.answer(question) for name, question in questions.items()}
        answer.write_bytes(self._facts.file(questions, answers))

    def told(self, call: Callable[[Path | None], T]) -> T:
        """`call` without facts, and once more with those that it wants."""
        try:
            return call(None)
        except FactsWanted as wanted:
            return call(self.ask(wanted))

    def ingest(self, source: Path, out: Path, *, narrow: str | None = None, max_rank: int = MAX_RANK) -> IngestReport:
        return self.told(lambda facts: run(source, self.card, out, narrow=narrow, max_rank=max_rank, facts=facts))
