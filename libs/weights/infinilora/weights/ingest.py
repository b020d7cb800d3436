"""Turn an adapter's files into a packed file that is known to be right, or say why not.

    unpack -> read -> plan (every check) -> write -> verify and self-test what was written -> only then does it exist

Also a process of its own, so that a hostile file can be given limits of memory and time:

    python -m infinilora.weights.ingest --source DIR|ARCHIVE --card CARD.json --out FILE [--narrow BF16] [--max-rank N]
        [--request FILE] [--facts FILE]

prints one JSON line: an `IngestReport` with status 0, {"error": ...} with status 3, or a `FactsNeeded` with status 4:
then what it must know of the base's weights stands in the request file (`factsfile`), and it wants to be run again
with the answer of an engine of that base.
"""

import argparse
import errno
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from infinilora.protocol.adapter import BaseCard, Manifest, manifest_digest
from infinilora.protocol.errors import InfiniLoraError, Internal, SourceNotFound, StoreFull, TooLarge, Unavailable
from infinilora.protocol.ids import Digest
from infinilora.protocol.ingest import ASKS_STATUS, MAX_RANK, FactsNeeded, IngestReport
from infinilora.weights.check import plan_adapter
from infinilora.weights.config import CONFIG_FILE
from infinilora.weights.facts import Facts, FactsWanted
from infinilora.weights.factsfile import write_request
from infinilora.weights.packed import write_packed
from infinilora.weights.peft import read_adapter
from infinilora.weights.reference import EXACT, NARROWED, PartReference, Reference, parts_of, reference_file
from infinilora.weights.refuse import invalid
from infinilora.weights.selftest import SelfTest, self_test
from infinilora.weights.unpack import INITIAL_DIRS, KEPT, FileLimits, unpack

REFUSED_STATUS = 3
NARROWED_RELATIVE = 2.0**-4
"""What narrowing may change of a delta at most. Past it the factors cancel each other, and rounding shows."""


def ingest(
    source: Path,
    card: BaseCard,
    out: Path,
    *,
    narrow: str | None = None,
    max_rank: int = MAX_RANK,
    facts: Path | None = None,
) -> Manifest:
    """Pack the adapter in `source` into `out`, which exists afterwards only if everything held. Blocking.

    Beside it lies what the files meant (`reference_file`), to test the packed file with when they are gone.
    Raises SourceNotFound or AdapterInvalid for what the adapter is, Unavailable if it changed meanwhile, Internal if
    the packed file does not compute the same, FactsWanted where `facts` (an answer file) lacks what it needs.
    """
    return run(source, card, out, narrow=narrow, max_rank=max_rank, facts=facts).manifest


def run(
    source: Path, card: BaseCard, out: Path, *, narrow: str | None, max_rank: int, facts: Path | None = None
) -> IngestReport:
    """`ingest`, with everything that was found out."""
    before = _state(source)
    adapter = read_adapter(source)
    plan = plan_adapter(adapter, card, max_rank=max_rank, narrow=narrow, facts=Facts(card, facts))
    draft = out.with_name(out.name + ".part")
    kept: list[PartReference] = []
    try:
        with draft.open("wb") as file:
            manifest = write_packed(plan, file)
        tested = self_test(source, card, draft, facts, keep=lambda *site: kept.extend(parts_of(*site)))
        if _state(source) != before:
            raise Unavailable("the adapter's files changed while they were read; try again", retry_after_s=1.0)
        _judge(tested, manifest)
        digest = manifest_digest(manifest)
        _write_reference(reference_file(out), digest, kept)
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return IngestReport(
        digest=digest,
        manifest=manifest,
        plan=plan.rows(),
        warnings=plan.notes,
        self_test_error=tested.error,
        narrow_error=tested.relative if manifest.narrowed_from else 0.0,
        declared_base=adapter.declared_base,
        num_pairs=sum(pair is not None for site in plan.sites for part in site.parts for pair in part.pairs),
    )


def _write_reference(path: Path, digest: Digest, parts: list[PartReference]) -> None:
    in_order = sorted(parts, key=lambda part: (part.layer, part.site, part.begin))
    path.write_bytes(msgspec.json.encode(Reference(digest=digest, parts=tuple(in_order))))


def _state(source: Path) -> dict[str, tuple[int, int, int]]:
    """(inode, size, time of the last change) of each file that is read."""
    found = {}
    for below in (source, *(source / name for name in INITIAL_DIRS)):
        for path in (below / name for name in sorted(KEPT)):
            if path.is_file():
                info = path.stat()
                found[str(path)] = (info.st_ino, info.st_size, info.st_mtime_ns)
    return found


def _judge(tested: SelfTest, manifest: Manifest) -> None:
    is_narrow = bool(manifest.narrowed_from)
    if not tested.error <= (NARROWED if is_narrow else EXACT):
        raise Internal(f"self-test: {tested.where}: found a delta that is off by {tested.error:.3g}; wanted the files'")
    if is_narrow and not tested.relative <= NARROWED_RELATIVE:
        raise invalid(
            CONFIG_FILE,
            f"narrow to {manifest.dtype}",
            found=f"a delta that differs by {tested.relative:.3g} of its size ({tested.worst_relative})",
            wanted=f"at most {NARROWED_RELATIVE:.3g}; register it without narrowing",
        )


# The worker process -------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The worker process. Returns its exit status."""
    options = _options(argv)
    try:
        card = _read_card(options.card)
        with _disk_errors(), _directory(options) as source:
            report = _run(source, card, options)
    except InfiniLoraError as error:
        _print_line({"error": error.to_wire()})
        return REFUSED_STATUS
    _print_line(report)
    return ASKS_STATUS if isinstance(report, FactsNeeded) else 0


def _run(source: Path, card: BaseCard, options: argparse.Namespace) -> IngestReport | FactsNeeded:
    try:
        return run(source, card, options.out, narrow=options.narrow, max_rank=options.max_rank, facts=options.facts)
    except FactsWanted as wanted:
        if options.request is None:
            raise Internal(f"{wanted}: found no --request to write them to") from wanted
        write_request(options.request, card.fingerprint, wanted.questions)
        return FactsNeeded(num_questions=len(wanted.questions), num_bytes=options.request.stat().st_size)


@contextmanager
def _directory(options: argparse.Namespace) -> Iterator[Path]:
    """The directory of the adapter's files; those of an archive lie beside `out` meanwhile."""
    if options.source.is_dir():
        yield options.source
        return
    if not options.source.exists():
        raise SourceNotFound(f"{options.source.name}: found nothing; wanted a directory or an archive", param="source")
    with tempfile.TemporaryDirectory(prefix="unpacked-", dir=options.out.absolute().parent) as target:
        yield unpack(options.source, Path(target), FileLimits(options.max_bytes))


@contextmanager
def _disk_errors() -> Iterator[None]:
    """What a disk says while files are read and written is nobody's fault who sent them."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull("no room on disk to read the adapter in", retry_after_s=5.0) from error
        if error.errno == errno.EFBIG:
            raise TooLarge("the adapter is larger than one file may be here", param="source") from error
        raise Unavailable(f"the adapter's files could not be read: {error.strerror}", retry_after_s=1.0) from error


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infinilora.weights.ingest", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a directory, or a tar or zip archive of one")
    parser.add_argument("--card", type=Path, required=True, help="the base card, JSON")
    parser.add_argument("--out", type=Path, required=True, help="the packed file to write")
    parser.add_argument("--narrow", choices=("BF16", "F16"), help="pack in a smaller dtype; not exact")
    parser.add_argument("--max-rank", type=int, default=MAX_RANK, help="of any module; higher ones are refused")
    parser.add_argument("--request", type=Path, help="where to write questions about the base's weights")
    parser.add_argument("--facts", type=Path, help="the answers to them")
    parser.add_argument("--max-bytes", type=int, default=FileLimits().max_bytes, help="of an archive, unpacked")
    return parser.parse_args(argv)


def _read_card(path: Path) -> BaseCard:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BaseCard)
    except (OSError, msgspec.DecodeError) as error:
        raise Internal(f"{path.name}: found {error}; wanted a base card") from error


def _print_line(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
