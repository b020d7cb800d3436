"""What registration would say of an adapter, without a server: the engine describes the base, ingest packs for it.

Ingest runs as a gateway runs it, within the same limits: a file to be checked is a stranger's. The base model is
described, and asked, by processes of their own, because they need torch, which this command does not have.
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from infinilora.cli.settings import child_env
from infinilora.gateway.ingest import IngestLimits, pack_adapter
from infinilora.protocol.adapter import BaseCard
from infinilora.protocol.errors import InfiniLoraError, Unavailable, WireError
from infinilora.protocol.ingest import IngestReport

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


def check(adapter: Path, model: Path, limits: IngestLimits, *, narrow: str = "") -> Verdict:
    """Blocking. Raises Unavailable when the model cannot be read, or a worker dies: then nobody knows."""
    card = msgspec.json.decode(_card(model), type=BaseCard)

    async def ask(_card: BaseCard, request: Path, answer: Path) -> None:
        await asyncio.to_thread(_answer, model, request, answer)  # the directory answers as an engine of it would

    with tempfile.TemporaryDirectory(prefix="infinilora-check-") as scratch:
        try:
            packing = pack_adapter(adapter.absolute(), card, Path(scratch), limits, narrow=narrow, ask=ask)
            report, _ = asyncio.run(packing)
        except Unavailable:
            raise
        except InfiniLoraError as error:
            if notes := getattr(error, "__notes__", None):
                raise Unavailable(f"the check died: {_end_of(notes[-1])}") from None
            return Verdict(base=card.name, error=error.to_wire())
    return Verdict(base=card.name, report=report)


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


def _end_of(noise: bytes | str) -> str:
    text = noise.decode(errors="replace") if isinstance(noise, bytes) else noise
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-LAST_LINES:]) or "it said nothing"
