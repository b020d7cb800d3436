"""Shell scripts: what `set -o pipefail` turns into a coin toss stays out."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_no_reader_that_leaves_early_ends_a_pipe(script: Path) -> None:
    """The writer then dies of the broken pipe, and whether the whole counts as failed depends on who was faster."""
    text = script.read_text()
    early = re.findall(r"\|\s*(?:grep\s+-\w*q|head\b)", text)
    assert not ("pipefail" in text and early), f"{script.name}: {early}"
