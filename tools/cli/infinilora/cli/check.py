"""What registration would say of an adapter, without a server: the engine describes the base, ingest packs for it.

Both run as processes of their own, because they need torch and numpy, which this command does not have.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from infinilora.cli.settings import child_env
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import Unavailable, WireError
from infinilora.protocol.ingest import ASKS_STATUS, IngestReport

LAST_LINES = 3
"""Of what a process said before it died: its exception, and where."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a check: the report of an adapter that can be served on `base`, or the error that refuses it."""

    base: str
    report: IngestReport | None = None
    error: WireError | None = None

    @property
    def is_servable(self) -> bool:
        return self.report is not None


class _Refusal(msgspec.Struct, frozen=True):
    """What the ingest worker prints instead of a report."""

    error: WireError


def check(adapter: Path, model: Path, *, max_rank: int, narrow: str = "") -> Verdict:
    """Blocking. Raises Unavailable when the model cannot be read, or a worker dies: then nobody knows."""
    with tempfile.TemporaryDirectory(prefix="infinilora-check-") as scratch:
        card_file, packed = Path(scratch, "card.json"), Path(scratch, "packed.safetensors")
        card_file.write_bytes(_card(model))
        base = msgspec.json.decode(card_file.read_bytes(), type=BaseCard).name
        wish = ["--max-rank", str(max_rank), *(["--narrow", narrow] if narrow else [])]
        request, facts = Path(scratch, "facts.request"), Path(scratch, "facts.answer")
        files = ["--source", adapter, "--card", card_file, "--out", packed, "--request", request]
        done = _run("infinilora.weights.ingest", [*map(str, files), *wish])
        if done.returncode == ASKS_STATUS:  # the directory answers as an engine of it would
            _answer(model, request, facts)
            done = _run("infinilora.weights.ingest", [*map(str, files), *wish, "--facts", str(facts)])
    try:
        if done.returncode == 0:
            return Verdict(base=base, report=msgspec.json.decode(done.stdout, type=IngestReport))
        return Verdict(base=base, error=msgspec.json.decode(done.stdout, type=_Refusal).error)
    except msgspec.DecodeError:
        raise Unavailable(f"the check ended with status {done.returncode}: {_end_of(done.stderr)}") from None


def _card(model: Path) -> bytes:
    done = _run("infinilora.engine.prepare", [str(model)])
    if done.returncode != 0:
        raise Unavailable(f"the base model in {model} cannot be described: {_end_of(done.stderr)}")
    return done.stdout


def _answer(model: Path, request: Path, out: Path) -> None:
    done = _run("infinilora.engine.facts", [str(model), "--request", str(request), "--out", str(out)])
    if done.returncode != 0:
        raise Unavailable(f"the base model in {model} cannot be asked: {_end_of(done.stderr)}")


def _run(module: str, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", module, *arguments]
    env = child_env(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    return subprocess.run(  # noqa: S603 - our own programs
        command, stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False
    )


def _end_of(noise: bytes) -> str:
    lines = [line for line in noise.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-LAST_LINES:]) or "it said nothing"
