"""What commands write where nobody looks."""

import pytest

from infinilora.cli.terminal import bars


def test_progress_bars_write_nothing_on_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    with bars() as progress:
        task = progress.add_task("uploading", total=2)
        progress.advance(task, 2)
        assert progress.tasks[task].finished, "a command may still ask how far it is"
    assert capfd.readouterr() == ("", "")
