"""What registration would say of an adapter, without a server: the engine describes the base, ingest packs for it.

Both run as processes of their own, because they need torch and numpy, which this command does not have.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from infinilora.cli.settings import child_env
from infinilora.protocol.adapter import (
    DTYPE_BYTES,
    VECTOR_BYTES,
    AdapterWarning,
    BaseCard,
    Manifest,
    PartEntry,
    SiteEntry,
)
from infinilora.protocol.errors import Unavailable, WireError
from infinilora.protocol.ingest import PlanRow

LAST_LINES = 3
"""Of what a process said before it died: its exception, and where."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a check. `error` says why an adapter is refused; without one it can be served."""

    base: str
    servable: bool
    digest: str = ""
    num_bytes: int = 0
    plan: tuple[PlanRow, ...] = ()
    warnings: tuple[AdapterWarning, ...] = ()
    self_test_error: float = 0.0
    error: WireError | None = None


class _Said(msgspec.Struct, frozen=True):
    """The line that the ingest worker prints."""

    digest: str = ""
    manifest: Manifest | None = None
    plan: tuple[PlanRow, ...] = ()
    warnings: tuple[AdapterWarning, ...] = ()
    self_test_error: float = 0.0
    error: WireError | None = None


def check(adapter: Path, model: Path, *, narrow: str = "") -> Verdict:
    """Blocking. Raises Unavailable when the model cannot be read, or a worker dies: then nobody knows."""
    with tempfile.TemporaryDirectory(prefix="infinilora-check-") as scratch:
        card_file, packed = Path(scratch, "card.json"), Path(scratch, "packed.safetensors")
        card_file.write_bytes(_card(model))
        card = msgspec.json.decode(card_file.read_bytes(), type=BaseCard)
        wish = ["--narrow", narrow] if narrow else []
        said = _ingest(["--source", str(adapter), "--card", str(card_file), "--out", str(packed), *wish])
    if said.error or not said.manifest:
        return Verdict(base=card.name, servable=False, plan=said.plan, warnings=said.warnings, error=said.error)
    return Verdict(
        base=card.name,
        servable=True,
        digest=said.digest,
        num_bytes=said.manifest.data_bytes,
        plan=said.plan or packed_rows(said.manifest, card),
        warnings=said.warnings or tuple(AdapterWarning(code="note", text=text) for text in said.manifest.warnings),
        self_test_error=said.self_test_error,
    )


def packed_rows(manifest: Manifest, card: BaseCard) -> tuple[PlanRow, ...]:
    """Module by module, what is in the packed file."""
    modules = {(s.layer, s.site, part.name): part.module for s in card.sites for part in s.parts}
    return tuple(
        PlanRow(
            site=entry.site.label,
            module=modules[entry.layer, entry.site, part.name],
            layer=entry.layer,
            rank=part.rank,
            scale=part.scale,
            num_bytes=_part_bytes(entry, part, manifest.dtype),
            experts=entry.num_experts,
            verdict="packed",
        )
        for entry in manifest.sites
        for part in entry.parts
    )


def _part_bytes(entry: SiteEntry, part: PartEntry, dtype: str) -> int:
    matrices = part.rank * (entry.in_dim + part.out_dim) * DTYPE_BYTES[dtype]
    vectors = (part.has_bias + part.has_colscale) * part.out_dim * VECTOR_BYTES
    return entry.num_blocks * (matrices + vectors)


def _card(model: Path) -> bytes:
    done = _run("infinilora.engine.prepare", [str(model)])
    if done.returncode != 0:
        raise Unavailable(f"the base model in {model} cannot be described: {_end_of(done.stderr)}")
    return done.stdout


def _ingest(arguments: list[str]) -> _Said:
    done = _run("infinilora.weights.ingest", arguments)
    try:
        said = msgspec.json.decode(done.stdout, type=_Said)
    except msgspec.DecodeError:
        said = _Said()
    if said.error is None and (done.returncode != 0 or said.manifest is None):
        raise Unavailable(f"the check ended with status {done.returncode}: {_end_of(done.stderr)}")
    return said


def _run(module: str, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", module, *arguments]
    env = child_env(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    return subprocess.run(  # noqa: S603 - our own programs
        command, stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False
    )


def _end_of(noise: bytes) -> str:
    lines = [line for line in noise.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-LAST_LINES:]) or "it said nothing"
