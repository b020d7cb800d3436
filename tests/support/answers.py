"""What an engine of a base would answer to an adapter's questions, from its checkpoint, without an engine."""

from pathlib import Path

from infinilora.engine.facts import Facts
from infinilora.engine.model.checkpoint import Checkpoint
from infinilora.engine.model.spec import read_spec
from infinilora.engine.prepare import fingerprint
from infinilora.protocol.adapter import BaseCard, Manifest
from infinilora.weights.check import plan_adapter
from infinilora.weights.facts import FactsWanted
from infinilora.weights.factsfile import write_request
from infinilora.weights.ingest import ingest
from infinilora.weights.peft import read_adapter


def answers_to(source: Path, card: BaseCard, checkpoint: Path, work: Path) -> Path | None:
    """The answer file in `work`; None: the adapter asks nothing."""
    try:
        plan_adapter(read_adapter(source), card)
    except FactsWanted as wanted:
        request, answer = work / "facts.request", work / "facts.answer"
        write_request(request, card.fingerprint, wanted.questions)
        spec = read_spec(checkpoint)
        opened = Checkpoint(checkpoint, spec)
        facts = Facts(spec, opened, fingerprint(spec, opened))
        questions = facts.read(request)
        answer.write_bytes(facts.file(questions, {name: facts.answer(asked) for name, asked in questions.items()}))
        return answer
    return None


def ingest_answered(source: Path, card: BaseCard, checkpoint: Path, packed: Path, **options: str) -> Manifest:
    """`ingest`, run again with answers where it asks for them; they lie beside `packed`."""
    return ingest(source, card, packed, facts=answers_to(source, card, checkpoint, packed.parent), **options)  # type: ignore[arg-type]
