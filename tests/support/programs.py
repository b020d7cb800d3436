"""Small services in processes of their own, for what only the end of a process shows."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

PRELUDE = """
import asyncio, sys, time, threading
from infinilora.runtime import log
from infinilora.runtime.service import Service, run
log.setup("test", "info")
def say(word):
    print(word, flush=True)
"""


class Program:
    """A small service in a process of its own."""

    def __init__(self, home: Path, body: str) -> None:
        path = home / "program.py"
        path.write_text(PRELUDE + textwrap.dedent(body))
        self.process = subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise AssertionError(f"the program ended without saying {word!r}")

    def end(self) -> tuple[int, str, list[dict[str, str]]]:
        """Exit status, the rest of stdout, log lines."""
        status, out, err = self.end_raw()
        return status, out, [json.loads(line) for line in err.splitlines()]

    def end_raw(self) -> tuple[int, str, str]:
        """Exit status, the rest of stdout, and stderr as it is."""
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err
