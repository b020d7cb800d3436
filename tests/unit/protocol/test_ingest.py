"""The report of ingest: what the worker prints is what its reader gets."""

import msgspec
import pytest

from infinilora.protocol.adapter import AdapterWarning, Manifest
from infinilora.protocol.ids import Fingerprint, digest_of
from infinilora.protocol.ingest import IngestReport, PlanRow

MANIFEST = Manifest(base=Fingerprint(digest_of(b"b")), dtype="F32", num_layers=1, source_digest="", sites=())


def test_a_report_survives_its_line() -> None:
    report = IngestReport(
        digest=digest_of(b"a"),
        manifest=MANIFEST,
        plan=(
            PlanRow(site="o", module="model.layers.0.self_attn.o_proj", layer=0, rank=4, scale=2.0, verdict="packed"),
            PlanRow(module="lm_head", verdict="refused", reason="found [4, 9], wanted [4, 8]"),
        ),
        warnings=(AdapterWarning(code="modules_missing", text="model.layers.1.mlp.up_proj and others", count=3),),
        self_test_error=1e-8,
        num_pairs=1,
    )
    line = msgspec.json.encode(report)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=IngestReport) == report


def test_a_verdict_is_one_of_three() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'skipped'"):
        msgspec.json.decode(b'{"module":"m","verdict":"skipped"}', type=PlanRow)
