"""A tiny base loaded into engines, adapters of it in a store, and the oracle of what each of them makes of it."""

from pathlib import Path

from infinilora.protocol import keys
from infinilora.protocol.adapter import manifest_digest
from infinilora.protocol.ids import Digest
from infinilora.runtime.blobs import DirectoryBlobs
from support.answers import ingest_answered
from support.engines import Heard, load_tiny
from support.oracle import Oracle, write_adapter
from support.tiny_models import make_tiny_model

LOGPROB = 1e-3
TEACHER_FORCED = 2e-3


class TinyWorld:
    """The store is `work/store`, as that of a `LoraGroup` in the same directory is."""

    def __init__(self, work: Path, name: str, **options: object) -> None:
        """`options` of the loaded model, besides those of `load_tiny`."""
        self.directory = make_tiny_model(name, work / "base").directory
        self.model = load_tiny(self.directory, **options)
        self.oracle = Oracle(self.directory)
        self.blobs = DirectoryBlobs(work / "store")
        self.sources: dict[Digest, Path] = {}
        self._work = work

    def add(self, targets: tuple[str, ...], *, rank: int, std: float = 0.2, dora: bool = False) -> Digest:
        """One more random adapter, ingested."""
        number = len(self.sources)
        source, packed = self._work / f"a{number}", self._work / f"a{number}.packed"
        write_adapter(source, self.directory, rank=rank, targets=targets, seed=number, std=std, dora=dora)
        digest = manifest_digest(ingest_answered(source, self.model.card, self.directory, packed))
        self.blobs.put_file(keys.packed(digest), packed)
        self.sources[digest] = source
        return digest

    def is_right(self, heard: Heard, prompt: list[int], digest: Digest | None) -> None:
        """Every token, and every log-probability that was asked for, of one who was told some tokens."""
        adapter = self.sources[digest] if digest else None
        assert self.oracle.shortfall(prompt, heard.tokens, adapter) < TEACHER_FORCED
        wanted = self.oracle.logprobs(prompt + heard.tokens, adapter)
        told = [score.logprob for score in heard.scores]
        assert all(abs(a - b) < LOGPROB for a, b in zip(told, wanted[len(prompt) - 1 :], strict=bool(told)))
        if heard.has_prompt_scores:
            told = [score.logprob for score in heard.prompt_scores]
            assert all(abs(a - b) < LOGPROB for a, b in zip(told, wanted[: len(prompt) - 1], strict=True))
