"""What `infinilora bench trace` refuses before anything is started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinilora.cli.__main__ import app


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "nowhere/trace.json"], "found no directory"),
        (["--picture", "layer.png"], "wanted a name that ends in .svg"),
        (["--ping-pong", "sometimes"], "'sometimes' is not one of 'off', 'auto', 'on'"),
        (["--lora", "none"], "'none' is not one of 'remote', 'local'"),
        (["--tokens", "1"], "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "trace", "--model", "anything", *words], env={"COLUMNS": "300"})
    assert done.exit_code in (1, 2)
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []
