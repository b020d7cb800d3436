"""Turn a PEFT directory into a packed file that is known to be right, or say why not.

    read -> plan (every check) -> write -> verify and self-test what was written -> only then does it exist

Also a process of its own, so that a hostile file can be given limits of memory and time:

    python -m infinilora.weights.ingest --source DIR --card CARD.json --out FILE

prints one JSON line, {"manifest", "digest", ...} with status 0 or {"error"} with status 3.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from infinilora.protocol.adapter import BaseCard, Manifest, manifest_digest
from infinilora.protocol.errors import InfiniLoraError, Internal
from infinilora.protocol.ids import Digest
from infinilora.weights.check import MAX_RANK, plan_adapter
from infinilora.weights.packed import write_packed
from infinilora.weights.peft import read_adapter
from infinilora.weights.selftest import self_test

REFUSED_STATUS = 3
EXACT = 1e-6
NARROWED = 2.0**-6
"""Largest self-test error allowed: rounding of float64 and of fp32 gains; twice the bound of two BF16 factors."""


class IngestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker process prints when all went well."""

    digest: Digest
    manifest: Manifest
    self_test_error: float


def ingest(source: Path, card: BaseCard, out: Path, *, narrow: str | None = None, max_rank: int = MAX_RANK) -> Manifest:
    """Pack the adapter in `source` into `out`, which exists afterwards only if everything held. Blocking.

    Raises AdapterInvalid for what the adapter is, Internal if the packed file does not compute the same.
    """
    return run(source, card, out, narrow=narrow, max_rank=max_rank).manifest


def run(source: Path, card: BaseCard, out: Path, *, narrow: str | None, max_rank: int) -> IngestResult:
    """`ingest`, with the self-test's error."""
    adapter = read_adapter(source)
    plan = plan_adapter(adapter, card, max_rank=max_rank, narrow=narrow)
    draft = out.with_name(out.name + ".part")
    try:
        with draft.open("wb") as file:
            manifest = write_packed(plan, file)
        error = self_test(adapter, card, draft)
        if not error <= (EXACT if narrow is None else NARROWED):
            raise Internal(f"self-test: found a delta that differs by {error:.3g} of its size from {source.name}'s own")
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return IngestResult(digest=manifest_digest(manifest), manifest=manifest, self_test_error=error)


def main(argv: list[str] | None = None) -> int:
    """The worker process. Returns its exit status."""
    options = _options(argv)
    try:
        card = _read_card(options.card)
        result = run(options.source, card, options.out, narrow=options.narrow, max_rank=options.max_rank)
    except InfiniLoraError as error:
        _print_line({"error": error.to_wire()})
        return REFUSED_STATUS
    _print_line(result)
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infinilora.weights.ingest", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="PEFT directory")
    parser.add_argument("--card", type=Path, required=True, help="the base card, JSON")
    parser.add_argument("--out", type=Path, required=True, help="the packed file to write")
    parser.add_argument("--narrow", choices=("BF16", "F16"), help="pack in a smaller dtype; not exact")
    parser.add_argument("--max-rank", type=int, default=MAX_RANK)
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
