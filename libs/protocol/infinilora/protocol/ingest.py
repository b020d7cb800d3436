"""What ingest says of an adapter: what it found module by module, and what came of it.

The worker prints an `IngestReport` as one JSON line; the adapter API keeps part of it, `check` prints it.
Knows no files.
"""

from typing import Literal

import msgspec

from infinilora.protocol.adapter import AdapterWarning, Manifest
from infinilora.protocol.ids import Digest

MAX_RANK = 512
"""The highest rank that is taken where the operator says no other: `INFINILORA_MAX_RANK` of the gateway."""


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one module of the adapter; of the experts of a layer together where they are alike."""

    site: str = ""
    """The site's label; empty where the base model has no site for this module."""
    module: str
    """The base model's name for it, with `{expert}` where experts differ."""
    layer: int = -1
    """-1: of no layer, or not known."""
    rank: int = 0
    scale: float = 0.0
    num_bytes: int = 0
    """Bytes of its A, Bt and vectors in the packed file, over all experts."""
    experts: int = 0
    """How many experts are adapted; 0: not a module of experts."""
    verdict: Literal["packed", "refused", "absent"]
    """`absent`: the config targets it and the files hold nothing for it."""
    reason: str = ""
    """Why it is refused or absent, naming file, tensor, found and wanted."""


ASKS_STATUS = 4
"""The worker's exit status when it needs facts of the base."""


class FactsNeeded(msgspec.Struct, frozen=True, kw_only=True):
    """Ingest must know more of the base's weights; its questions are in a file for an engine of that base."""

    num_questions: int
    num_bytes: int


class IngestReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ingest made. It exists only for an adapter that was packed and passed its self-test."""

    digest: Digest
    manifest: Manifest
    plan: tuple[PlanRow, ...] = ()
    warnings: tuple[AdapterWarning, ...] = ()
    self_test_error: float
    """The largest error of any site's delta against the original files, of the delta's size there."""
    narrow_error: float = 0.0
    """The part of it that narrowing made; 0 when nothing was narrowed."""
    num_pairs: int = 0
    """Pairs of A and B packed, each expert's counted."""
    declared_base: str = ""
    """The base model that the adapter's own config names; empty where it names none."""
