"""`infinilora up` with options that cannot be: told before anything is prepared or started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinilora.cli.__main__ import app


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--lora", "nolora"], "wanted 'remote', 'local' or 'none'"),
        (["--lora-shape", "0x1"], "wanted 1 to 64"),
        (["--lora-shape", "2"], "wanted ExL"),
        (["--lora", "local", "--lora-shape", "2x2"], "no LoRA server of shape 2x2"),
        (
            ["--engines", "2", "--max-engines", "1"],
            "--min-engines is 2, --engines 2 and --max-engines 1; wanted none smaller",
        ),
        (["--min-engines", "2"], "--min-engines is 2, --engines 1 and --max-engines 1; wanted none smaller"),
        (["--shards", "zero"], "wanted a whole number of at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_cannot_be_are_told_before_a_model_is_prepared(
    options: list[str], wanted: str, tmp_path: Path
) -> None:
    told = CliRunner().invoke(app, ["up", *options, "--var-dir", str(tmp_path / "var")])
    assert told.exit_code != 0
    assert wanted in " ".join(told.output.split())
    assert not (tmp_path / "var").exists()
